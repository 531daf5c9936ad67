"""From torch tensors to a launch of a norm's kernel.

A call first takes the launcher that the last call of its kind took, for accesses as wide as N allows, and leaves every
check to the compiled function: dtypes, shapes, strides, addresses and devices; leading dimensions to `joined`. Only
where these refuse, or nothing is known yet, the call is looked at closely (`_carefully`): the words for a user, or the
launcher for narrower accesses.
"""
import math
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from .. import runtime
from ..runtime import arch, clusters, dtypes, new, ops
from ..runtime.joined import joined
from . import checks, kept_plan
from .plan import plan
from .spec import GROUP, NormSpec

_MAX_ROWS = 1 << 30  # of one launch: the kernel counts rows in 32 bits

_known = ops.Known()  # what a call looks like, addresses aside -> its launcher for whole accesses, for any dimensions
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
    return runtime.Recipe("tkq.norms.build:build", (spec, config or plan(spec)))


def compiled(spec: NormSpec, device):
    """What runs a spec on a device, called as `build` has the arguments."""
    kept = kept_plan.planned(spec)
    if kept is None:
        return runtime.function(recipe(spec))
    run, units = runtime.function(kept_plan.recipe(spec, kept)), kept.resident * clusters.resident(
        device, kept.cluster, kept.block)
    return lambda *given: run(*given, units)


# ---- calls that came before ----------------------------------------------------------------------------------


def plain(kind: str, x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], eps: float,
          out: Optional[Tensor] = None) -> Tensor:
    """y alone, without options: as `norm` below, with as little Python as it takes. out: a contiguous tensor like x to
    write to, for whoever owns the memory."""
    y = out
    try:
        index, dtype, shape = x.get_device(), x.dtype, tuple(x.shape)
        run = _known.get((kind, index, dtype, shape[-1], weight is not None and weight.dtype,
                          bias is not None and bias.dtype))
        # a NaN is not 0 or more; what is not read as (M, N) is for `norm`
        if run is not None and eps >= 0.0 and (len(shape) == 2 or _heads(x, None, weight) is None):
            if y is None:
                stride = (shape[1], 1) if len(shape) == 2 else x.stride() if x.is_contiguous() else new.strides(shape)
                y = new.empty(index, shape, stride, dtype)
            run(x, weight, bias, y, eps)
            return y
    except Exception:  # nothing is known, or it was refused
        pass
    call = kind, eps, 0.0, None, None, False, None
    return (norm(call, x, weight, bias, None) if y is None else _carefully(Call(*call), x, weight, bias, None, y))[0]


def norm(call: tuple, x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor],
         residual: Optional[Tensor]) -> Results:
    """All that the call asks for, in new tensors. call: a Call, or the plain tuple of its fields."""
    results = None
    try:
        index, dtype, shape = x.get_device(), x.dtype, tuple(x.shape)
        heads = None if len(shape) == 2 else _heads(x, residual, weight)
        run = _known[call, heads, index, dtype, shape[-1], weight is not None and weight.dtype,
                     bias is not None and bias.dtype, residual is not None and residual.dtype]
        results = y, total, rstd, mean, scale = _allocate(call, x, index, dtype, shape)
        run(x, weight, bias, y, residual, total, rstd, mean, scale, call[1], call[2] or None)
        return results
    except Exception:  # nothing is known, or it was refused
        pass
    del results  # so that its memory is free
    return _carefully(Call(*call), x, weight, bias, residual)


def _heads(x, residual, weight):
    """How rows are to be read: None, as (M, N); "weight", as (R, H, N), where each head has a weight of its own;
    "rows", the same, where they share one and their places take two strides."""
    if weight is not None and weight.dim() == 2:
        return "weight"
    if x.dim() < 3 or (x.is_contiguous() and (residual is None or residual.is_contiguous())):
        return None
    one, two = (all(t is None or new.one_stride(t, kept) is not None for t in (x, residual)) for kept in (1, 2))
    return "rows" if two and not one else None


def _rows(x, residual, weight):
    """((x, residual), heads): both as (M, N) or, for heads (see `_heads`), as (R, H, N). Copies only what that does not
    describe."""
    heads = _heads(x, residual, weight)
    kept = 1 if heads is None else 2
    return tuple(t if t is None or t.dim() == kept + 1 else _folded(t, kept) for t in (x, residual)), heads


def _folded(t, kept):
    found = new.folded(t, kept)
    return t.reshape(-1, *t.shape[t.dim() - kept:]) if found is None else found


def _allocate(call, x, index, dtype, shape) -> Results:
    """index, dtype, shape: x's, the shape as a plain tuple."""
    _, _, _, out, total, stats, scale = call
    make = new.maker(index)
    stride = (shape[1], 1) if len(shape) == 2 else x.stride() if x.is_contiguous() else new.strides(shape)
    y, h = make(shape, stride, out or dtype), None if total is None else make(shape, stride, total)
    if stats or scale is not None:
        return y, h, *_of_rows(call, make, shape)
    return y, h, None, None, None


def _of_rows(call, make, shape):
    """rstd, mean and scale."""
    M, rstd, mean, scale = shape[0] if len(shape) == 2 else math.prod(shape[:-1]), None, None, None
    if call[5]:
        rstd = make((M,), (1,), torch.float32)
        mean = make((M,), (1,), torch.float32) if call[0] == "layernorm" else None
    if call[6] == "row":
        scale = make((M, 1), (1, 1), torch.float32)
    elif call[6] is not None:
        scale = make((M, -(-shape[-1] // GROUP)), (1, -(-M // 4) * 4), torch.float32)
    return rstd, mean, scale


def allocate(call: tuple, x: Tensor) -> Results:
    """New tensors for what a call asks for."""
    return _allocate(call, x, x.get_device(), x.dtype, tuple(x.shape))


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
    results = allocate(call, x) if out is None else (out, None, None, None, None)
    if not x.numel():
        return results
    arguments = _arguments(call, rows, weight, bias, results)
    run, plain_ = _launcher(call, heads, arguments)
    for part in _parts((*arguments[:4], call.eps) if plain_ else arguments):
        run(*part)
    return results


def _launcher(call, heads, arguments):
    """(launcher, whether its spec is without options). Remembered for the next call too, where it takes any address
    that torch gives to a new tensor."""
    x, weight, bias, y, residual, total = arguments[:6]
    width = vector([t for t in (x, residual, y, total) if t is not None], (weight, bias))
    key = _key(call, x, weight, bias, residual, heads)
    kind = call._replace(eps=0.0, offset=bool(call.offset)), key[1:], width
    found = _launchers.get(kind)
    if found is None:
        spec = _spec(call, heads, arguments, width)
        run = compiled(spec, x.device)
        found = _launchers[kind] = run, spec.plain, _joined(run, spec) if width == spec.widest else None
    run, plain_, known = found
    if known is not None:
        _known.add(key, known)
    return run, plain_


def _joined(run, spec):
    """The launcher for tensors of any dimensions."""
    if spec.plain:
        return joined(run, 5, {0: 1}, {3: 1})
    kept = 2 if spec.heads else 1
    return joined(run, 11, {0: kept, 4: kept}, {3: 1, 5: 1})


def _key(call, x, weight, bias, residual, heads):
    """What `plain` and `norm` look for."""
    kind = (x.get_device(), x.dtype, x.shape[-1], weight is not None and weight.dtype, bias is not None and bias.dtype)
    if residual is None and heads is None and call == Call(call.kind, call.eps):
        return call.kind, *kind
    return call, heads, *kind, residual is not None and residual.dtype


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
