"""The benchmark harness: `compare` times an operation beside its peers, `cpu_time_per_call` prices a call's host side.

The timing itself is `tkq.testing.timing`, shared with the demo; here are the clocks, power, costs and tables around.
"""

from __future__ import annotations

import gc
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from bench.results import Bound, Case, Cost, Reading
from tkq.testing import timing
from tkq.testing.timing import BURST, Effort


@dataclass(frozen=True)
class Question:
    """What a case asks: the operation, its shape as text, the work of one call (see `Case`) and the bound to reach."""

    section: str
    op: str
    shape: str
    unit: str
    work: float
    bound: Bound | None = None
    missing: dict[str, str] = field(default_factory=dict)


def compare(
    question: Question,
    candidates: Mapping[str, Callable],
    make_inputs: Callable[[int], tuple],
    effort: Effort = BURST,
    *,
    error: Callable[[str, tuple, object], float | None] | None = None,
    monitor: Monitor | None = None,
    gpu=None,
) -> Case:
    """Time the candidates ("tkq" among them) in turns and answer the question. See `tkq.testing.timing.compare`."""
    readings: dict[str, list[Reading]] = {}

    def during(name: str) -> None:
        readings.setdefault(name, []).append(monitor.read())

    live = monitor is not None and monitor.live
    comparison = timing.compare(candidates, make_inputs, effort, error=error, during=during if live else None, gpu=gpu)
    if monitor is not None and not live:
        readings[""] = [monitor.read()]
    q = question
    return Case(
        q.section,
        q.op,
        q.shape,
        q.unit,
        q.work,
        comparison,
        bound=q.bound,
        readings={name: tuple(r) for name, r in readings.items()},
        missing=dict(q.missing),
    )


class Monitor:
    """Reads the GPU's SM clock, power and temperature, and changes none of them.

    live: NVML answers (package nvidia-ml-py), in well under a millisecond, so it is read while a candidate works.
    The power is NVML's average over about a second, so across candidates; the clock is that of the moment.
    Otherwise nvidia-smi is asked once after each case; where that fails too, readings hold None.
    """

    def __init__(self):
        self.driver = "unknown"
        self._nvml = self._handle = None
        try:
            import pynvml

            pynvml.nvmlInit()
            uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
            driver = pynvml.nvmlSystemGetDriverVersion()
            self.driver = driver.decode() if isinstance(driver, bytes) else driver
            self._nvml = pynvml
        except Exception:  # no package, no library or no permission: nvidia-smi is left
            self.driver = _smi("driver_version")[0] or "unknown"

    @property
    def live(self) -> bool:
        return self._nvml is not None

    def read(self) -> Reading:
        if self._nvml is None:
            mhz, watts, celsius = map(_number, _smi("clocks.sm,power.draw,temperature.gpu", 3))
            return Reading(mhz and int(mhz), watts, celsius and int(celsius))
        nvml, handle = self._nvml, self._handle
        return Reading(
            _try(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            _try(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
            _try(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        )


def _try(read):
    try:
        return read()
    except Exception:
        return None


def _smi(query: str, fields: int = 1) -> list[str | None]:
    """What nvidia-smi answers for the current device, None for each field where it does not."""
    try:
        uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", f"--id=GPU-{uuid}"]
        out = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
        values = [v.strip() for v in out.strip().split(",")]
        return values if len(values) == fields else [None] * fields
    except Exception:
        return [None] * fields


def _number(text: str | None) -> float | None:
    try:
        return float(text)
    except (TypeError, ValueError):
        return None


def cpu_time_per_call(
    name: str,
    call: Callable[[], object],
    *,
    batches: int = 31,
    calls: int = 200,
    at_most: float | None = None,
    synchronize: Callable[[], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Cost:
    """Host microseconds of one eager call: the median over batches, on one CPU, gradients and garbage collection off.

    Give it tiny tensors: a batch must be queued without waiting for the GPU, so `calls` stays below the driver's queue.
    """
    synchronize = synchronize or (torch.cuda.synchronize if torch.cuda.is_available() else lambda: None)
    times = []
    with _one_cpu() as pinned, torch.no_grad():
        for batch in range(batches + 2):
            synchronize()
            begin = clock()
            for _ in range(calls):
                call()
            took = clock() - begin
            if batch >= 2:  # the first two warm caches
                times.append(took / calls * 1e6)
        synchronize()
    note = "" if pinned else "not pinned to a CPU"
    return Cost(name, statistics.median(times), min(times), max(times), batches, at_most, note)


@contextmanager
def _one_cpu():
    """This thread on one CPU, without garbage collection; True where the system let us pin it."""
    before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    pinned = False
    try:
        if before:
            try:
                os.sched_setaffinity(0, {max(before)})
                pinned = True
            except OSError:
                pass
        yield pinned
    finally:
        if pinned:
            os.sched_setaffinity(0, before)
        if collecting:
            gc.enable()


def case_lines(case: Case) -> list[str]:
    """A case as text: one line for each candidate, with rate, spread, launches, error, clock, power and ratio."""
    lines = []
    ratios = case.ratios()
    best = case.against_best()
    for t in case.comparison.timings:
        label = f"{case.op:10s} {case.shape:32s} {t.name:14s}"
        if not t.ok:
            lines.append(f"{label} FAILED {t.note}")
            continue
        low, high = t.quartiles_ms
        cells = [
            f"{t.median_ms * 1e3:10.2f} us +-{(high - low) / 2 / t.median_ms:5.1%}",
            f"{case.rate(t.name):7.0f} {case.unit}",
        ]
        cells.append("  ? launches" if t.launches is None else f"{t.launches:3g} launches")
        cells.append(" " * 12 if t.error is None else f"err {t.error:.2e}")
        cells.append(_state(case.readings.get(t.name) or case.readings.get("") or ()))
        if t.mode != "graph":
            cells.append(f"[{t.mode}]")
        if t.name in ratios:
            cells.append(f"{ratios[t.name]:6.3f}x")
        lines.append(f"{label} {'  '.join(cells)}")
    for name, why in case.missing.items():
        lines.append(f"{case.op:10s} {case.shape:32s} {name:14s} MISSING {why}")
    if _wrong(case):
        lines.append(f"{case.op:10s} {case.shape:32s}{_wrong(case)}: the error of tkq is beyond twice the best peer's")
    if case.bound is not None:
        verdict = {True: "holds", False: "MISSED", None: "not decided: a peer is missing"}[case.holds()]
        reached = f"{best[1]:.3f}x {best[0]}" if best else "nothing compared"
        lines.append(
            f"{'':10s} bound {case.bound.at_least:.2f}x {' / '.join(case.bound.against)}: {reached}: {verdict}"
        )
    return lines


def _state(readings) -> str:
    def middle(values):
        known = [v for v in values if v is not None]
        return f"{statistics.median(known):.0f}" if known else "?"

    return f"{middle(r.sm_mhz for r in readings):>4s} MHz {middle(r.watts for r in readings):>3s} W"


def summary(cases: list[Case], costs: list[Cost]) -> str:
    """The compact table at the end of a run: one line for each case and cost."""
    rows = [f"{'op':10s} {'shape':32s} {'tkq':>14s} {'best peer':>24s} {'ratio':>7s} {'bound':>6s}"]
    for case in cases:
        ours, best = case.comparison[case.ours], case.against_best()
        own = f"{case.rate(case.ours):.0f} {case.unit}" if ours.ok else "FAILED"
        peer = f"{best[0]} {case.rate(best[0]):.0f}" if best else "none"
        reached = f"{best[1]:.3f}" if best else "-"
        wanted = f"{case.bound.at_least:.2f}" if case.bound else "-"
        rows.append(
            f"{case.op:10s} {case.shape:32s} {own:>14s} {peer:>24s} {reached:>7s} {wanted:>6s} "
            f"{_mark(case.holds())}{_wrong(case)}"
        )
    for cost in costs:
        limit = "-" if cost.at_most is None else f"{cost.at_most:g}"
        rows.append(f"{cost.name:58s} {cost.median_us:10.1f} us   at most {limit} {_mark(cost.holds())} {cost.note}")
    return "\n".join(rows)


def _wrong(case: Case) -> str:
    return " WRONG RESULT" if case.comparison[case.ours].ok and case.accurate() is False else ""


def _mark(holds: bool | None) -> str:
    return {True: "ok", False: "MISSED", None: ""}[holds]
