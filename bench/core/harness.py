"""The benchmark harness: `compare` times an operation and its baselines, `cpu_times` measures the host side of calls.

The timing itself is `tkq.testing.timing`, shared with the demo; here are the clocks, power, costs and tables around.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from bench.core import accuracy
from bench.core.results import Bound, Case, Cost, Reading, busy, host
from bench.peers import common
from tkq.testing import timing
from tkq.testing.timing import BURST, Effort

WRONG = 0.2  # a relative error that no precision explains


@dataclass(frozen=True)
class Question:
    """What a case asks: the operation, its shape as text, the work of one call (see `Case`) and the bounds to reach:
    beside peers, and beside something that only moves the bytes. instead: what counts in the first one's place where
    one of its peers was not timed, as it is not there or its result is another one. alike, equal_error: as in
    `Case`."""

    section: str
    op: str
    shape: str
    unit: str
    work: float
    bound: Bound | None = None
    missing: dict[str, str] = field(default_factory=dict)
    roof: Bound | None = None
    alike: tuple[str, ...] = ()
    instead: Bound | None = None
    equal_error: float | None = None


@dataclass(frozen=True)
class Call:
    """An eager call on tiny tensors, whether autograd records it, and the bound of its host time in microseconds."""

    run: Callable[[], object]
    recorded: bool = False
    at_most: float | None = None


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
    comparison = dataclasses.replace(comparison, timings=tuple(map(_counted, comparison.timings)))
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
        bound=_in_force(q, comparison),
        readings={name: tuple(r) for name, r in readings.items()},
        missing=dict(q.missing),
        roof=q.roof,
        round_seconds=effort.round_seconds,
        idle_seconds=effort.idle_seconds,
        alike=q.alike,
        equal_error=q.equal_error,
    )


def _in_force(question: Question, comparison: timing.Comparison) -> Bound | None:
    """The question's bound, or what it has in its place where one of the bound's peers was not timed."""
    timed = {t.name for t in comparison.timings if t.ok}
    return question.bound if question.instead is None or timed.issuperset(question.bound.against) else question.instead


def _counted(timed: timing.Timing) -> timing.Timing:
    """The same, or a failure where a result, ours or a baseline's, is another one: its time says nothing then."""
    if not timed.ok or timed.error is None or timed.error <= WRONG:
        return timed
    return dataclasses.replace(timed, mode="failed", times_ms=(), between_ms=(), note=f"wrong: error {timed.error:.2g}")


def device_copy(gpu=None) -> float | None:
    """GB/s that an elementwise kernel reads and writes, at 1 GiB a call: the roof of what memory bounds. None where it
    could not be timed."""
    work = 2 * 2**29
    make = lambda i: (torch.full((work // 4,), float(i), device="cuda", dtype=torch.bfloat16),)
    try:
        timed = timing.compare({"copy": common.copied}, make, Effort(7, 0.01, 0.05), gpu=gpu)["copy"]
    except Exception:  # too little memory: the roof is not known then, all else is
        return None
    return work / timed.median_ms / 1e6 if timed.ok else None


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


def cpu_times(
    calls: Mapping[str, Call],
    *,
    batches: int = 31,
    size: int = 200,
    synchronize: Callable[[], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Cost]:
    """Host microseconds of each call: the median over batches of `size`, on one CPU, without garbage collection.

    The calls take turns, a batch each, so that a host that is slow for a while is slow for all of them. Tiny tensors: a
    batch must be queued without waiting for the GPU, so `size` stays below the driver's queue. A recorded call goes
    forward, with autograd's bookkeeping.
    """
    synchronize = synchronize or (torch.cuda.synchronize if torch.cuda.is_available() else lambda: None)
    times: dict[str, list[float]] = {name: [] for name in calls}
    with _one_cpu() as pinned:
        for batch in range(batches + 2):
            for name, call in calls.items():
                took = _batch(call, size, synchronize, clock)
                if batch >= 2:  # the first two warm caches
                    times[name].append(took / size * 1e6)
        synchronize()
    note = "" if pinned else "not pinned to a CPU"
    return [
        Cost(name, statistics.median(t), min(t), max(t), len(t), calls[name].at_most, note) for name, t in times.items()
    ]


def quiet_cpu_times(measure: Callable[[], list[Cost]], attempts: int = 3) -> list[Cost]:
    """Costs of all calls from one attempt, and another where `x + x` says that the host had other work: the attempt in
    which that took least, and of how many. Where there were several, each cost's note says which one it is of."""
    tried = [measure()]
    while busy(tried[-1]) is not None and len(tried) < attempts:
        tried.append(measure())
    if len(tried) == 1:
        return tried[0]
    best = min(range(len(tried)), key=lambda i: host(tried[i]).median_us)
    said = f"attempt {best + 1} of {len(tried)}: the host was busy in another"
    return [dataclasses.replace(cost, note="; ".join(filter(None, (cost.note, said)))) for cost in tried[best]]


def call_once(call: Call) -> None:
    """A call by itself, waited for: compiles what it needs, and raises what it raises."""
    with torch.set_grad_enabled(call.recorded):
        call.run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _batch(call: Call, size: int, synchronize, clock) -> float:
    run = call.run
    synchronize()
    with torch.set_grad_enabled(call.recorded):
        begin = clock()
        for _ in range(size):
            run()
        return clock() - begin


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
                os.sched_setaffinity(0, {_quietest(before)})
                pinned = True
            except OSError:
                pass
        yield pinned
    finally:
        if pinned:
            os.sched_setaffinity(0, before)
        if collecting:
            gc.enable()


def _quietest(cpus, clock=time.perf_counter) -> int:
    """The CPU on which plain Python runs fastest now: others may be at work for somebody else, or beside somebody."""
    took = {}
    for cpu in cpus:
        os.sched_setaffinity(0, {cpu})
        took[cpu] = statistics.median(_spin(clock) for _ in range(5))
    return min(took, key=took.get)


def _spin(clock) -> float:
    begin = clock()
    for _ in range(20000):  # about a millisecond
        pass
    return clock() - begin


def case_lines(case: Case) -> list[str]:
    """A case as text: one line for each candidate, with rate, spread, launches, error, clock, power and ratio."""
    lines = []
    ratios = case.ratios()
    for t in case.comparison.timings:
        label = f"{case.op:10s} {case.shape:32s} {t.name:14s}"
        if not t.ok:
            lines.append(f"{label} FAILED {t.note}")
            continue
        low, high = t.quartiles_ms
        cells = [
            f"{t.median_ms * 1e3:10.2f} us +-{(high - low) / 2 / t.median_ms:5.1%}",
            *([f"between {case.timing(t.name).median_ms * 1e3:.2f} us"] if case.between else ()),
            f"{case.rate(t.name):7.0f} {case.unit}",
        ]
        cells.append("  ? launches" if t.launches is None else f"{t.launches:3g} launches")
        cells.append(" " * 12 if t.error is None else f"err {t.error:.2e}{_error_ratio(case, t)}")
        cells.append(" " * 12 if t.host_us is None else f"host {t.host_us:4.0f} us")
        cells.append(_state(case.readings.get(t.name) or case.readings.get("") or ()))
        if t.mode != "graph":
            cells.append(f"[{t.mode}]")
        if t.name in ratios:
            cells.append(f"{ratios[t.name]:6.3f}x")
        lines.append(f"{label} {'  '.join(cells)}")
    for name, why in case.missing.items():
        lines.append(f"{case.op:10s} {case.shape:32s} {name:14s} MISSING {why}")
    if _wrong(case):
        lines.append(f"{case.op:10s} {case.shape:32s}{_wrong(case)}: the error exceeds "
                     f"{accuracy.rule(case.equal_error)}")
    for bound in filter(None, (case.bound, case.roof)):
        verdict = {True: "holds", False: "MISSED", None: "undecided: a baseline is missing"}[case.holds_beside(bound)]
        best = case.beside(bound)
        reached = f"{best[1]:.3f}x {best[0]}" if best else "no baseline timed"
        lines.append(f"{'':10s} bound {bound.at_least:.2f}x {' / '.join(bound.against)}: {reached}: {verdict}")
    return lines


def _error_ratio(case: Case, t: timing.Timing) -> str:
    """Our error over a peer's, where they have to be equal."""
    ours = case.comparison[case.ours].error
    return "" if case.equal_error is None or not t.error or None in (ours, case.errors().get(t.name)) else (
        f" ({ours / t.error:.2f}x)")


def _state(readings) -> str:
    def middle(values):
        known = [v for v in values if v is not None]
        return f"{statistics.median(known):.0f}" if known else "?"

    return f"{middle(r.sm_mhz for r in readings):>4s} MHz {middle(r.watts for r in readings):>3s} W"


def summary(cases: list[Case]) -> str:
    """The table at the end of a run: a line for each case with its best baseline and its roofline."""
    head = f"{'op':24s} {'shape':32s} {'tkq':>12s} {'best baseline':>24s} {'ratio':>6s} {'bound':>6s}"
    rows = [f"{head} {'':6s} {'roofline':>14s} bound"]
    for case in cases:
        ours, best = case.comparison[case.ours], case.against_best()
        own = f"{case.rate(case.ours):.0f} {case.unit}" if ours.ok else "FAILED"
        peer = f"{best[0]} {case.rate(best[0]):.0f}" if best else "none"
        reached = f"{best[1]:.3f}" if best else "-"
        wanted = f"{case.bound.at_least:.2f}" if case.bound else "-"
        mark = _mark(case.bound and case.holds_beside(case.bound))
        rows.append(
            f"{case.op:24s} {case.shape:32s} {own:>12s} {peer:>24s} {reached:>6s} {wanted:>6s} {mark:6s} {_roof(case)}"
            f"{_wrong(case)}".rstrip()
        )
    return "\n".join(rows)


def _roof(case: Case) -> str:
    if case.roof is None or not (best := case.beside(case.roof)):
        return ""
    return f"{f'{best[0]} {best[1]:.3f}':>14s} {case.roof.at_least:.2f} {_mark(case.holds_beside(case.roof))}"


def cost_lines(costs: list[Cost]) -> list[str]:
    """Each cost with its spread and its bound."""
    return [
        f"{c.name:66s} {c.median_us:9.2f} us ({c.least_us:.1f} to {c.most_us:.1f})"
        f"{'' if c.at_most is None else f'  bound {c.at_most:g} {_mark(c.holds())}'} {c.note}".rstrip()
        for c in costs
    ]


def _wrong(case: Case) -> str:
    return " WRONG RESULT" if case.comparison[case.ours].ok and case.accurate() is False else ""


def _mark(holds: bool | None) -> str:
    return {True: "ok", False: "MISSED", None: ""}[holds]
