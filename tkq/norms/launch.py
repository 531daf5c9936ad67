"""From torch tensors to a launch of a norm's kernel.

A call first takes the launcher that the last call of its kind took, for accesses as wide as N allows, and leaves every
check to the compiled function: dtypes, shapes, strides, addresses and devices. Only where that refuses, or nothing is
known yet, the call is looked at closely (`_carefully`): the words for a user, or the launcher for narrower accesses.
"""
import math
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from .. import runtime
from ..runtime import arch, clusters, dtypes, new, ops
from . import checks, kept_plan
from .plan import plan, waits_together
from .spec import GROUP, NormSpec

_MAX_ROWS = 1 << 30  # of one launch: the kernel counts rows in 32 bits

_known: dict = {}  # what a call looks like, addresses aside -> its launcher for whole accesses
_seen = ops.Known()  # of calls with options -> (launcher, what results are made from, views for the launch or None)
_launchers: dict = {}  # the same and the elements of an access -> (its launcher, whether it is one without options)


class Call(NamedTuple):
    """What is asked for beside the tensors. out, total: torch types of the result and of the sum of x and residual,
    None for x's type and for no sum. stats: rstd (and mean) too. scale: None, "row" or "block"."""

    kind: str
    eps: float
    offset: float = 0.0
    out: Optional[torch.dtype] = None
    total: Optional[torch.dtype] = None
    stats: bool = False
    scale: Optional[str] = None


# What comes back, a plain tuple: y and the sum, of x's shape; rstd and mean, (rows,); scale, (rows, 1 or groups). None
# for what was not asked for.
Results = tuple[Tensor, Optional[Tensor], Optional[Tensor], Optional[Tensor], Optional[Tensor]]


def total_dtype(x: Tensor, residual: Optional[Tensor], residual_dtype: Optional[torch.dtype]):
    """The type in which the sum is to be written, where it is a result; None where x itself is that sum."""
    if residual is not None:
        return residual_dtype or residual.dtype
    return None if residual_dtype is None or residual_dtype == x.dtype else residual_dtype


def recipe(spec: NormSpec, config=None):
    """The recipe of a spec, with its planned config or another one."""
    config = config or plan(spec)
    return runtime.Recipe(f"tkq.norms.{'several' if waits_together(spec, config) else 'build'}:build", (spec, config))


def compiled(spec: NormSpec, device):
    """What runs a spec on a device, called as `build` has the arguments."""
    kept = kept_plan.planned(spec)
    if kept is None:
        return runtime.function(recipe(spec))
    run, units = runtime.function(kept_plan.recipe(spec, kept)), kept.resident * clusters.resident(
        device, kept.cluster, kept.block)
    return lambda *given: run(*given, units)


# ---- without options: the same as `norm` below, with as little Python as it takes ----------------------------


def plain(kind: str, x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], eps: float,
          out: Optional[Tensor] = None) -> Tensor:
    """y alone. out: a contiguous tensor like x to write to, for whoever owns the memory."""
    y = None
    try:
        index, dtype, shape = x.get_device(), x.dtype, x.shape
        N = shape[-1]
        run = _known[kind, False, index, dtype, N, weight is not None and weight.dtype, bias is not None and bias.dtype]
        flat = len(shape) == 2
        rows = x if flat else _one_stride(x, weight, N)
        M = shape[0] if flat else rows.shape[0]
        if 0 < M <= _MAX_ROWS and eps >= 0.0:  # a NaN is not
            y = new.empty(index, (M, N), (N, 1), dtype) if out is None else new.rows(out, M, N)
            run(rows, weight, bias, y, eps)
            return out if out is not None else y if flat else new.shaped(y, x)
    except Exception:  # nothing is known, or it was refused
        if out is None and y is not None:
            out = new.shaped(y, x)
    call = Call(kind, eps)
    return (norm(call, x, weight, bias, None) if out is None else _carefully(call, x, weight, bias, None, out))[0]


def plain_with_statistics(kind: str, x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], eps: float):
    """(y, rstd, mean), as `norm` would return them."""
    try:
        index, dtype, shape = x.get_device(), x.dtype, x.shape
        N = shape[-1]
        run = _known[kind, True, index, dtype, N, weight is not None and weight.dtype, bias is not None and bias.dtype]
        flat = len(shape) == 2
        rows = x if flat else _one_stride(x, weight, N)
        M = shape[0] if flat else rows.shape[0]
        if 0 < M <= _MAX_ROWS and eps >= 0.0:
            y = new.empty(index, (M, N), (N, 1), dtype)
            rstd = new.empty(index, (M,), (1,), torch.float32)
            mean = new.empty(index, (M,), (1,), torch.float32) if kind == "layernorm" else None
            run(rows, weight, bias, y, None, None, rstd, mean, None, eps, None)
            return y if flat else new.shaped(y, x), rstd, mean
    except Exception:
        pass
    y, _, rstd, mean, _ = norm(Call(kind, eps, stats=True), x, weight, bias, None)
    return y, rstd, mean


def _one_stride(x, weight, N):
    """x as (M, N) rows that share a weight. Raises where it is not that."""
    if weight is not None and weight.dim() != 1:
        raise ValueError
    return new.rows(x, x.numel() // N, N) if x.is_contiguous() else x.view(-1, N)


# ---- with options -------------------------------------------------------------------------------------------


def norm(call: tuple, x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor],
         residual: Optional[Tensor]) -> Results:
    """All that the call asks for, in new tensors. call: a Call, or the plain tuple of its fields."""
    given, results = (x, weight, bias, residual), None
    try:
        index = x.get_device()
        key = (call, index, x.dtype, x.shape, x.stride(), weight is not None and (weight.dtype, weight.dim()),
               bias is not None and bias.dtype,
               residual is not None and (residual.dtype, residual.shape, residual.stride()))
        seen = _seen.get(key)
        if seen is not None:
            run, made, views = seen
            y, total, rstd, mean, scale = results = tuple([m and new.empty(index, *m) for m in made])
            of_y, of_total = y, total
            if views is not None:
                of_x, of_residual, (M, N) = views
                x, residual = new.over(x, *of_x), of_residual and new.over(residual, *of_residual)
                of_y, of_total = new.rows(y, M, N), total if total is None else new.rows(total, M, N)
            run(x, weight, bias, of_y, residual, of_total, rstd, mean, scale, call[1], call[2] or None)
            return results
        call = Call(*call)
        if residual is not None and residual.shape != x.shape:
            raise ValueError  # _carefully has the words; rows of other sizes may be as many
        rows, heads = _rows(x, residual, weight)
        run = _known[_key_with_options(call, x, weight, bias, residual, heads)]
        if 0 < x.numel() <= _MAX_ROWS:  # so many elements are no more rows
            results = _allocate(call, x)
            run(*_arguments(call, rows, weight, bias, results))
            _remember(key, run, (x, residual), rows, results)
            return results
    except Exception:  # nothing is known, or it was refused
        pass
    del results  # so that its memory is free
    return _carefully(Call(*call), *given)


def _remember(key, run, given, rows, results):
    """What `norm` needs of a call that comes again. Not where rows had to be copied."""
    if any(t is not None and t.data_ptr() != r.data_ptr() for t, r in zip(given, rows)):
        return
    made, views = tuple([t if t is None else (tuple(t.shape), t.stride(), t.dtype) for t in results]), None
    y = results[0]
    if rows[0] is not given[0] or y.dim() != 2:
        of_x, of_residual = (t if t is None else (tuple(t.shape), t.stride()) for t in rows)
        views = of_x, of_residual, (y.numel() // y.shape[-1], y.shape[-1])
    _seen.add(key, (run, made, views))


def _key_with_options(call, x, weight, bias, residual, heads):
    return (call, heads, x.get_device(), x.dtype, x.shape[-1], weight is not None and weight.dtype,
            bias is not None and bias.dtype, residual is not None and residual.dtype)


def _rows(x, residual, weight):
    """((x, residual), heads): both as (M, N), heads None; or as (R, H, N), heads "rows" or "weight".

    The latter where each head has a weight of its own, and where the rows' places take two strides. Copies only what
    neither describes."""
    if weight is not None and weight.dim() == 2:
        return (_folded(x, 2, True), _folded(residual, 2, True)), "weight"
    if x.dim() == 2:
        return (x, residual), None
    two = _folded(x, 1), _folded(residual, 1)
    if two[0] is not None and (two[1] is not None or residual is None):
        return two, None
    if x.dim() > 2:
        three = _folded(x, 2), _folded(residual, 2)
        if three[0] is not None and (three[1] is not None or residual is None):
            return three, "rows"
    return (_folded(x, 1, True), _folded(residual, 1, True)), None


def _folded(t, kept, copy=False):
    """t with all but the last `kept` dimensions made one. Where no stride describes that one: a copy, or None."""
    if t is None:
        return None
    shape, strides = t.shape, t.stride()
    last, size, step = tuple(shape[-kept:]), 1, 0
    for n, stride in zip(shape[-kept - 1::-1], strides[-kept - 1::-1]):
        if n != 1:
            if size == 1:
                step = stride
            elif stride != size * step:
                return t.reshape(-1, *last) if copy else None  # sizes one by one: read faster than a tuple
            size *= n
    return new.over(t, (size, *last), (step if size > 1 else math.prod(last), *strides[-kept:]))


def _allocate(call, x) -> Results:
    kind, _, _, out, total, stats, scale = call
    index = x.get_device()
    y = new.like(x, index, out or x.dtype)
    h = None if total is None else new.like(x, index, total)
    if not stats and scale is None:
        return y, h, None, None, None
    M, rstd, mean = x.numel() // x.shape[-1], None, None
    if stats:
        rstd = new.empty(index, (M,), (1,), torch.float32)
        mean = new.empty(index, (M,), (1,), torch.float32) if kind == "layernorm" else None
    if scale == "row":
        return y, h, rstd, mean, new.empty(index, (M, 1), (1, 1), torch.float32)
    return y, h, rstd, mean, None if scale is None else scales(scale, M, x)


def scales(granularity: str, M: int, x: Tensor) -> Tensor:
    """Room for the scales of M rows like x's: (M, 1), or (M, groups) with the columns contiguous, of M rounded up to 4.
    """
    if granularity == "row":
        return torch.empty(M, 1, dtype=torch.float32, device=x.device)
    shape, stride = (M, -(-x.shape[-1] // GROUP)), (1, -(-M // 4) * 4)
    return torch.empty_strided(shape, stride, dtype=torch.float32, device=x.device)


def _arguments(call, rows, weight, bias, results):
    """As `build` has them, for a spec with options."""
    x, residual = rows
    y, total, rstd, mean, scale = results
    if y.dim() != 2:
        N = x.shape[-1]
        M = y.numel() // N
        y, total = new.rows(y, M, N), None if total is None else new.rows(total, M, N)
    return x, weight, bias, y, residual, total, rstd, mean, scale, call.eps, call.offset or None


# ---- the first call of a kind -------------------------------------------------------------------------------


def _carefully(call, x, weight, bias, residual, out=None):
    """Find the launcher, compile it where it is new, and call it. `out` takes the place of y."""
    checks.norm(call.kind, x, weight, bias, residual, None if call.scale else call.out, call.total)
    checks.eps(call.kind, call.eps)
    if call.stats:
        checks.gradient_of_heads(call.kind, x, weight)
    arch.require_hopper(x.device)
    rows, heads = _rows(x, residual, weight)
    results = _allocate(call, x) if out is None else (out, None, None, None, None)
    if not x.numel():
        return results
    arguments = _arguments(call, rows, weight, bias, results)
    run, plain_ = _launcher(call, heads, arguments, _key(call, x, weight, bias, residual, heads))
    for part in _parts((*arguments[:4], call.eps) if plain_ else arguments):
        run(*part)
    return results


def _launcher(call, heads, arguments, key):
    """(launcher, whether its spec is without options). Remembered for the next call too, where it takes any address
    that torch gives to a new tensor."""
    x, weight, bias, y, residual, total = arguments[:6]
    width = vector([t for t in (x, residual, y, total) if t is not None], (weight, bias))
    found = _launchers.get((key, width))
    if found is None:
        spec = _spec(call, heads, arguments, width)
        found = _launchers[key, width] = compiled(spec, x.device), spec.plain
        if width == spec.widest:
            _known[key] = found[0]
    return found


def _key(call, x, weight, bias, residual, heads):
    if residual is None and heads is None and call == Call(call.kind, call.eps, stats=call.stats):
        return (call.kind, call.stats, x.get_device(), x.dtype, x.shape[-1], weight is not None and weight.dtype,
                bias is not None and bias.dtype)
    return _key_with_options(call, x, weight, bias, residual, heads)


def _spec(call, heads, arguments, width):
    x, _, _, y, *_ = arguments
    x_, weight, bias, _, residual, total = (None if t is None else dtypes.name_of(t.dtype) for t in arguments[:6])
    out = None if y.dtype == x.dtype else dtypes.name_of(y.dtype)
    return NormSpec(call.kind, x.shape[-1], x_, weight, bias, width, residual, total, out, call.scale,
                    bool(call.offset), call.stats, heads)


def vector(streams, vectors=()) -> int:
    """Elements of one access: as many as 16 bytes of the widest stream, N, the strides of rows and every base address
    allow."""
    vector = 16 // max(t.element_size() for t in streams)
    while not (all(_fits(t, vector) for t in streams) and all(
            t is None or t.data_ptr() % min(16, vector * t.element_size()) == 0 for t in vectors)):
        vector //= 2
    return vector


def _fits(t, vector):
    return not (t.data_ptr() % (vector * t.element_size()) or t.shape[-1] % vector
                or any(s % vector for s in t.stride()[:-1]))


def _parts(arguments):
    """The arguments of each launch: one, or as many as so many rows need."""
    x, y = arguments[0], arguments[3]
    if y.shape[0] <= _MAX_ROWS:
        return [arguments]
    of_position = y.shape[0] // x.shape[0]
    step = max(1, _MAX_ROWS // of_position)
    return [_part(arguments, i, min(step, x.shape[0] - i), of_position) for i in range(0, x.shape[0], step)]


def _part(arguments, first, count, of_position):
    """Positions `first` and on of x and residual, and the rows that they are."""
    def cut(i, t):
        if not isinstance(t, Tensor) or i in (1, 2):  # weight and bias are all rows'
            return t
        n = 1 if i in (0, 4) else of_position
        return t.narrow(0, first * n, count * n)

    return tuple(cut(i, t) for i, t in enumerate(arguments))
