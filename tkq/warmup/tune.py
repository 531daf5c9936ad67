"""tkq.tune: the fastest configuration for one call, by measuring it here and now."""
from __future__ import annotations

import importlib
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ..gemm import candidates
from ..gemm.tuned import stored
from ..runtime import arguments
from ..runtime.compile import tuned
from ..runtime.device import arch
from ..testing import timing

OPS = {"gemm": "tkq.gemm.dense.launch", "fp8_gemm": "tkq.gemm.fp8.ops", "grouped_gemm": "tkq.gemm.grouped.ops"}
GAIN = 1.005  # what is faster by less is as fast as the plan's, which stays
ERROR = 0.02  # of a result's norm: configurations differ in the order of sums, and in where they round
PIECE = 64  # of a row of a result, judged by itself
MOST_JUDGED = 1 << 26  # numbers of a result at once
_again = arguments.checker("tune", "again")
EFFORT = timing.Effort(rounds=9, round_seconds=0.02, warmup_seconds=0.2)


@dataclass(frozen=True)
class Tuned:
    """What was found for a call.

    chosen: the configuration, as text. gain: the plan's time / its time. times: {configuration: milliseconds}, medians,
    the plan's first. failed: {configuration: what was wrong with it}. path: where it is stored; delete it to forget.
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

    The inputs are copied until they exceed the L2 cache, as far as memory goes; nothing of yours is written, ``out``
    neither. Candidates are compiled first, seconds each, stored in the kernel cache, and take turns, as
    ``tkq.testing.timing`` says; one whose result is not that of the planned configuration is left out. (Last bits may
    differ, and so may those of calls before and after: some configurations add up K in another order.)

    What is found is saved in the folder ``tuned`` of the kernel cache (``tkq.runtime.compile.cache().folder``),
    one JSON file a call, which later processes read when such a call comes first. A call that has been tuned is not
    measured again, unless the products' sources have changed since. ``tkq.runtime.ignore_tuned()`` takes what is
    planned, for one process.

    Args:
        function: ``tkq.gemm``, ``tkq.fp8_gemm`` or ``tkq.grouped_gemm``.
        args, kwargs: as it takes them: CUDA tensors, with the values to be expected (power depends on them).
        effort: rounds, and seconds of one candidate's turn.
        again: measure although it has been tuned.

    Returns:
        What was found; None where there is one kernel only: nothing to multiply, strides or bases that TMA cannot take.

    Raises:
        TypeError: again is no bool; effort is of another kind.
        ValueError: another function, tensors on the CPU.
        And what the function itself raises.

    Example::

        x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
        w = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16)
        found = tkq.tune(tkq.gemm, x, w.t(), activation="silu")
        y = tkq.gemm(x, w.t(), activation="silu")  # runs what was found
    """
    name, again = _name(function), _again(again)
    if not isinstance(effort, timing.Effort):
        raise TypeError(f"tune: effort: got {type(effort).__name__}, expected a tkq.testing.timing.Effort")
    with _on(args, kwargs):
        tunable = importlib.import_module(OPS[name]).tunable(*args, **kwargs)
        configs = candidates.of(tunable.problem, arch.num_sms(tunable.result.device))
        if not configs:
            return None
        found = None if again else _known(tunable)
        if found is None:
            found = _measured(tunable, configs, effort)
    tuned.clear()  # of what was found by another process, too
    tunable.clear()
    return found


def _name(function) -> str:
    import tkq  # public names; this module is one of them

    name = next((name for name in OPS if getattr(tkq, name) is function), None)
    if name is None:
        raise ValueError(f"function: got {function!r}, allowed are " + ", ".join(f"tkq.{name}" for name in OPS))
    return name


def _on(args, kwargs):
    """The tensors' device made the current one: what allocates, captures and waits does so there."""
    devices = [x.device for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    for device in devices:
        if device.type != "cuda":
            raise ValueError(f"tune: got a tensor on {device}, allowed are CUDA tensors")
    return torch.cuda.device(devices[0]) if devices else nullcontext()  # without any, the function itself says so


def _known(tunable):
    """What was found before; None where today's kernels do not take it."""
    note = tuned.read(tunable.problem)
    config = stored(tunable.problem, note, tunable.configs)
    try:
        return config and Tuned(str(config), note["gain"], note["times"], note["failed"], str(tunable.problem.path))
    except KeyError:
        return None


def _measured(tunable, candidates, effort, gpu=None):
    """Time the candidates, choose, and store what was found. gpu: see ``timing.compare``."""
    configs = {str(config): config for config in candidates}
    calls = {name: lambda *inputs, config=config: tunable.call(config, *inputs) for name, config in configs.items()}
    first = []

    def error(name, inputs, _):  # what came out before may lie in memory that another candidate filled
        output = tunable.call(configs[name], _blank(tunable.result), *inputs[1:])
        first[:] = first or [output]
        return _off(tunable.defined(output), tunable.defined(first[0]))

    def make_inputs(i):  # each set writes to memory of its own: nothing of the user's, nor an input, where c is out
        return _laid_out(tunable.result), *(_copies(tunable.inputs) if i else tunable.inputs)

    compared = timing.compare(calls, make_inputs, effort, error=error, gpu=gpu)
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
    """||output - wanted|| / ||wanted|| of what is finite or, if that is more, an eighth of the same for the worst 64
    numbers of a row; infinite where they are not finite in the same places."""
    if not wanted.numel():
        return 0.0
    pairs = zip(*(z.reshape(-1, z.shape[-1]).split(max(1, MOST_JUDGED // z.shape[-1])) for z in (output, wanted)))
    sums = [_in_pieces(x.double(), y.double()) for x, y in pairs]
    if None in sums:
        return float("inf")
    wrong, size = map(torch.cat, zip(*sums))
    whole = wrong.sum() / size.sum().clamp_min(1e-60)
    least = 1e-2 * size.mean(1, keepdim=True) + 1e-4 * size.mean() + 1e-60  # what cancels is no measure
    return max(whole.sqrt(), (wrong / least.maximum(size)).amax().sqrt() / 8).item()


def _in_pieces(x, y):
    """The sums of (x - y)^2 and of y^2 over each PIECE numbers of each row; None where others are finite."""
    finite = y.isfinite()
    if not torch.equal(x.isfinite(), finite):
        return None
    x, y = x.where(finite, 0), y.where(finite, 0)
    return tuple(F.pad(z.square(), (0, -z.shape[1] % PIECE)).unflatten(1, (-1, PIECE)).sum(2) for z in (x - y, y))


def _blank(pattern: Tensor) -> Tensor:
    """Memory for a result, all NaN: what is not written shows."""
    y = _laid_out(pattern)
    if y.element_size() > 1:
        return y.fill_(float("nan"))
    y.view(torch.uint8).fill_(0xFF)  # NaN of either float8
    return y


def _copies(inputs) -> tuple:
    """Each tensor again: the same values, sizes, strides, and address modulo 16 bytes."""
    return tuple(x if x is None else _copy(x) for x in inputs)


def _copy(x: Tensor) -> Tensor:
    y = _laid_out(x)
    if 0 in x.stride():  # an expanded matrix: its elements lie on each other
        index = tuple(slice(None, 1) if stride == 0 else slice(None) for stride in x.stride())
        y[index].copy_(x[index])
        return y
    return y.copy_(x)


def _laid_out(x: Tensor) -> Tensor:
    """New memory with another tensor's sizes, strides, and address modulo 16 bytes."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride())) if x.numel() else 0
    first = x.data_ptr() % 16 // x.element_size()
    memory = torch.empty(first + span, dtype=x.dtype, device=x.device)
    return memory.as_strided(x.shape, x.stride(), first)
