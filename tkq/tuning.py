"""tkq.tune: the fastest configuration for one call, by measuring it here and now."""
from __future__ import annotations

import importlib
from dataclasses import dataclass

import torch
from torch import Tensor

from .runtime import tuned
from .testing import timing

OPS = {"gemm": "tkq.gemm.call", "fp8_gemm": "tkq.gemm.fp8_ops", "grouped_gemm": "tkq.gemm.grouped_ops"}
GAIN = 1.005  # what is faster by less is as fast as the plan's, which stays
ERROR = 0.02  # of a result's norm: configurations differ in the order of sums, and in where they round
EFFORT = timing.Effort(rounds=9, round_seconds=0.02, warmup_seconds=0.2)


@dataclass(frozen=True)
class Tuned:
    """What was found for a call.

    chosen: the configuration, as text. gain: the plan's time / its time. times: {configuration: milliseconds}, medians,
    the plan's first. failed: {configuration: what was wrong with it}. path: where it is kept; delete it to forget.
    """

    chosen: str
    gain: float
    times: dict
    failed: dict
    path: str

    def __str__(self):
        return f"{self.gain:.3f} times as fast as planned, of {len(self.times)} configurations: {self.chosen}"


def tune(function, *args, effort: timing.Effort = EFFORT, again: bool = False, **kwargs) -> Tuned | None:
    """Measure which kernel configuration is the fastest for a call, and take it for all such calls from now on::

        tkq.tune(tkq.gemm, x, weight.t(), bias=bias)
        y = tkq.gemm(x, weight.t(), bias=bias)  # runs what was found

    Without it, configurations come from a plan, a table and a cost model; nothing is ever measured in a call. Such
    calls are those of the same function, sizes, dtypes, orders of memory, alignment and options, on this kind of GPU;
    for ``grouped_gemm`` with the same numbers of rows and of groups, whatever the groups' sizes. Where a gradient is
    recorded, the products of the backward are calls of their own: ``tkq.tune(tkq.gemm, dy, weight)`` and
    ``tkq.tune(tkq.gemm, dy.t(), x)`` for the line above.

    The inputs are copied until they exceed the L2 cache, as far as memory goes; nothing but ``out``, where it is given,
    is written. Candidates are compiled first, seconds each and kept in the kernel cache, and take turns, as
    ``tkq.testing.timing`` says; one whose result is not that of the planned configuration is left out. (Last bits may
    differ, and so may those of calls before and after: some configurations add up K in another order.)

    What is found is kept on disk, in the folder ``tuned`` of the kernel cache (``tkq.runtime.cache().folder``), one
    JSON file a call, which later processes read when such a call comes first. A call that has been tuned is not
    measured again.

    Args:
        function: ``tkq.gemm``, ``tkq.fp8_gemm`` or ``tkq.grouped_gemm``.
        args, kwargs: as it takes them: CUDA tensors, with the values to be expected (power depends on them).
        effort: rounds, and seconds of one candidate's turn.
        again: measure although it has been tuned.

    Returns:
        What was found; None where there is one kernel only: nothing to multiply, strides or bases that TMA cannot take.

    Raises:
        ValueError: another function, tensors on the CPU. And what the function itself raises.
    """
    tunable = _tunable(function, args, kwargs)
    if not tunable.candidates:
        return None
    found = None if again else _known(tunable)
    if found is None:
        found = _measured(tunable, effort)
        tunable.forget()
    return found


def _tunable(function, args, kwargs):
    import tkq  # public names; this module is one of them

    name = next((name for name in OPS if getattr(tkq, name) is function), None)
    if name is None:
        raise ValueError(f"function: got {function!r}, allowed are " + ", ".join(f"tkq.{name}" for name in OPS))
    for x in (*args, *kwargs.values()):
        if isinstance(x, Tensor) and not x.is_cuda:
            raise ValueError(f"tune: got a tensor on {x.device}, allowed are CUDA tensors")
    return importlib.import_module(OPS[name]).tunable(*args, **kwargs)


def _known(tunable):
    """What was found before; None where today's kernels do not take it."""
    note = tuned.read(tunable.problem)
    config = tuned.config(note, tunable.problem.spec, {type(c).__name__: type(c) for c in tunable.candidates})
    try:
        return config and Tuned(str(config), note["gain"], note["times"], note["failed"], str(tunable.problem.path))
    except KeyError:
        return None


def _measured(tunable, effort, gpu=None):
    """Time the candidates, choose, and keep what was found. gpu: see ``timing.compare``."""
    configs = {str(config): config for config in tunable.candidates}
    calls = {name: lambda *inputs, config=config: tunable.call(config, *inputs) for name, config in configs.items()}
    first = []

    def error(_, inputs, output):
        first[:] = first or [output.clone()]
        return _off(tunable.defined(output), tunable.defined(first[0]))

    compared = timing.compare(calls, lambda i: _copies(tunable.inputs) if i else tunable.inputs, effort, error=error,
                              gpu=gpu)
    planned, *_ = compared.timings
    if not planned.ok:
        raise RuntimeError(f"tune: the planned configuration failed: {planned.note}")
    right = [t for t in compared.timings if t.ok and t.error <= ERROR]
    best = max(right, key=lambda t: timing.ratio(t, planned))
    best = best if timing.ratio(best, planned) >= GAIN else planned
    failed = {t.name: t.note or f"its result is off by {t.error:.2g}" for t in compared.timings if t not in right}
    notes = dict(gain=timing.ratio(best, planned), times={t.name: t.median_ms for t in right}, failed=failed)
    path = tuned.write(tunable.problem, configs[best.name], notes)
    return Tuned(best.name, path=str(path), **notes)


def _off(output, wanted) -> float:
    """||output - wanted|| / ||wanted|| of what is finite; infinite where they are not finite in the same places."""
    x, y = output.float(), wanted.float()
    finite = y.isfinite()
    if not torch.equal(x.isfinite(), finite):
        return float("inf")
    x, y = x.where(finite, 0), y.where(finite, 0)
    return ((x - y).norm() / y.norm().clamp_min(1e-30)).item()


def _copies(inputs) -> tuple:
    """Each tensor again: the same values, sizes, strides, and address modulo 16 bytes."""
    return tuple(x if x is None else _copy(x) for x in inputs)


def _copy(x: Tensor) -> Tensor:
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride())) if x.numel() else 0
    first = x.data_ptr() % 16 // x.element_size()
    memory = torch.empty(first + span, dtype=x.dtype, device=x.device)
    y = memory.as_strided(x.shape, x.stride(), first)
    if 0 in x.stride():  # an expanded matrix: its elements lie on each other
        index = tuple(slice(None, 1) if stride == 0 else slice(None) for stride in x.stride())
        y[index].copy_(x[index])
        return y
    return y.copy_(x)
