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
from ..runtime.call import alloc, check, dtypes
from ..runtime.call.alignment import vector
from ..runtime.call.dispatch import Ended, Shapes, added
from ..runtime.call.replay import CallCache
from ..runtime.device import arch, clusters
from . import checks, fp8_persistent_plan, persistent_plan
from .plan import plan
from .spec import GROUP, NormSpec

_END = check.FLOAT32_END
_MAX_ROWS = 1 << 30  # of one launch: the kernel counts rows in 32 bits

_launch_cache: dict = {}  # what is called -> choosers of launchers for whole accesses; see `plain` and `norm`
_call_cache = CallCache()  # of `again`
_launchers: dict = {}  # what a call looks like, and the elements of an access -> its launcher, whether without options
# The arguments of `plain`'s choosers are those of a launcher without options. One for heads has all of `norm`'s.
_OF_PLAIN, _OF_NORM = (0, 1, 2, 3, None, None, None, None, None, 4, None), (0, 1, 2, 3, 9)


class Call(NamedTuple):
    """What is asked for beside the tensors. out, total: torch types of the result and of the sum of x and residual,
    None for x's type and for no sum. stats: rstd (and mean) too. scale: None, "row" or "1x128"."""

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
    return runtime.Recipe("tkq.norms.forward.build:build", (spec, config or plan(spec)))


def compiled(spec: NormSpec, device):
    """What runs a spec on a device, called as `build` has the arguments."""
    for way in (persistent_plan, fp8_persistent_plan):
        kept = way.planned(spec)
        if kept is not None:
            units = kept.min_blocks_per_sm * clusters.resident(device, kept.cluster, kept.block)
            return Ended(runtime.function(way.recipe(spec, kept)), units)
    return runtime.function(recipe(spec))


# ---- calls that came before ----------------------------------------------------------------------------------


def plain(kind: str, x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], eps: float,
          out: Optional[Tensor] = None) -> Tensor:
    """y alone, without options: as `norm` below, with as little Python as it takes. out: a contiguous tensor like x to
    write to, for the owner of the memory."""
    y = out
    try:
        if y is None:
            shape = tuple(x.shape)
            stride = (shape[1], 1) if len(shape) == 2 else x.stride() if x.is_contiguous() else alloc.strides(shape)
            y = alloc.empty(x.get_device(), shape, stride, x.dtype)
        if 0.0 <= eps < _END:  # a NaN is not
            _launch_cache[kind](x, weight, bias, y, eps)
            return y
    except Exception:  # nothing is known, or it was refused
        pass
    return _carefully(Call(kind, eps), x, weight, bias, None, y)[0]


def norm(call: tuple, x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor],
         residual: Optional[Tensor]) -> Results:
    """All that the call asks for, in new tensors. call: a Call, or the plain tuple of its fields."""
    kind, eps, offset, out, total, stats, scale = call
    y = h = rstd = mean = scales = None
    try:
        if 0.0 <= eps < _END:
            shape, make = tuple(x.shape), alloc.maker(x.get_device())
            stride = (shape[1], 1) if len(shape) == 2 else x.stride() if x.is_contiguous() else alloc.strides(shape)
            y = make(shape, stride, out or x.dtype)
            if total is not None:
                h = make(shape, stride, total)
            if stats or scale is not None:
                rstd, mean, scales = _of_rows(call, make, shape)
            _launch_cache[kind, scale](x, weight, bias, y, residual, h, rstd, mean, scales, eps, offset or None)
            return y, h, rstd, mean, scales
    except Exception:  # nothing is known, or it was refused
        pass
    del y, h  # so that their memory is free
    return _carefully(Call(*call), x, weight, bias, residual)


def replayed(call: tuple, x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor],
             residual: Optional[Tensor]) -> Results:
    """The same, for eager calls of which autograd keeps the results."""
    found = _call_cache.take(x, weight, bias, residual, *call)
    if found is None:
        found = norm(call, x, weight, bias, residual)
        _call_cache.add((x, weight, bias, residual, *call), *launched(call, x, weight, bias, residual, found), found)
    return found


def launched(call: tuple, x, weight, bias, residual, found: Results) -> tuple:
    """(what launches such a call, if anything is known, the arguments of this one): for `Again.add`."""
    y, h, rstd, mean, scales = found
    return known(call[0], call[6]), (x, weight, bias, y, residual, h, rstd, mean, scales, call[1], call[2] or None)


def known(*place):
    """The chooser of `plain`'s launchers (kind) or `norm`'s (kind, scale); None where there is none yet."""
    return _launch_cache.get(place if len(place) == 2 else place[0])


def _heads(x, residual, weight):
    """How rows are to be read: None, as (M, N); "weight", as (R, H, N), where each head has a weight of its own;
    "rows", the same, where they share one and their places take two strides."""
    if weight is not None and weight.dim() == 2:
        return "weight"
    if x.dim() < 3 or (x.is_contiguous() and (residual is None or residual.is_contiguous())):
        return None
    one, two = (all(t is None or alloc.one_stride(t, kept) is not None for t in (x, residual)) for kept in (1, 2))
    return "rows" if two and not one else None


def _rows(x, residual, weight):
    """((x, residual), heads): both as (M, N) or, for heads (see `_heads`), as (R, H, N). Copies only what that does not
    describe."""
    heads = _heads(x, residual, weight)
    kept = 1 if heads is None else 2
    return tuple(t if t is None or t.dim() == kept + 1 else _folded(t, kept) for t in (x, residual)), heads


def _folded(t, kept):
    found = alloc.folded(t, kept)
    return t.reshape(-1, *t.shape[t.dim() - kept:]) if found is None else found


def allocate(call: tuple, x: Tensor) -> Results:
    """New tensors for what a call asks for."""
    _, _, _, out, total, stats, scale = call
    shape, make = tuple(x.shape), alloc.maker(x.get_device())
    stride = (shape[1], 1) if len(shape) == 2 else x.stride() if x.is_contiguous() else alloc.strides(shape)
    y, h = make(shape, stride, out or x.dtype), None if total is None else make(shape, stride, total)
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


def _arguments(call, rows, weight, bias, results):
    """As `build` has them, for a spec with options."""
    x, residual = rows
    y, total, rstd, mean, scale = results
    if y.dim() != 2:
        N = x.shape[-1]
        M = y.numel() // N
        y, total = alloc.rows(y, M, N), None if total is None else alloc.rows(total, M, N)
    return x, weight, bias, y, residual, total, rstd, mean, scale, call.eps, call.offset or None


# ---- the first call of a kind -------------------------------------------------------------------------------


def _carefully(call, x, weight, bias, residual, out=None):
    """Find the launcher, compile it where it is new, and call it. `out` takes the place of y."""
    name = call.kind if call.scale is None else f"{call.kind}_quant"
    checks.norm(name, x, weight, bias, residual)
    checks.EPS[name](call.eps)
    if call.stats:
        checks.gradient_of_heads(call.kind, x, weight)
    arch.require_hopper(x.device)
    rows, heads = _rows(x, residual, weight)
    results = allocate(call, x) if out is None else (out, None, None, None, None)
    if not x.numel():
        return results
    arguments = _arguments(call, rows, weight, bias, results)
    spec, run = _launcher(call, heads, arguments)
    _remember(spec, run, arguments)
    for part in _parts((*arguments[:4], call.eps) if spec.plain else arguments):
        run(*part)
    return results


def _launcher(call, heads, arguments):
    """(its spec, the launcher)."""
    x, weight, bias, y, residual, total = arguments[:6]
    width = vector([t for t in (x, residual, y, total) if t is not None], (weight, bias))
    key = _key(call, x, weight, bias, residual, heads), width
    if key not in _launchers:
        spec = _spec(call, heads, arguments, width)
        _launchers[key] = spec, compiled(spec, x.device)
    return _launchers[key]


def _key(call, x, weight, bias, residual, heads):
    """What a spec is made from but the width of an access, found faster than a spec is made."""
    return (call._replace(eps=0.0, offset=bool(call.offset)), heads, x.get_device(), x.dtype, x.shape[-1],
            *(t is not None and t.dtype for t in (weight, bias, residual)))


def _remember(spec, run, arguments):
    """For the calls that come next, where the launcher takes any address that torch gives to a new tensor."""
    if spec.vector != spec.widest:
        return
    kept, place = 2 if spec.heads else 1, (spec.kind, spec.scale)
    # rows that are one matrix are not for a kernel of heads, or what a call runs would depend on those before it
    fewest = spec.heads == "rows"
    shapes = Shapes({0: kept, 4: kept}, {3: 1, 5: 1}, takes=_OF_NORM if spec.plain else None, fewest=fewest)
    _launch_cache[place] = added(_launch_cache.get(place), run, arguments, shapes)
    if spec.out is None and not spec.offset and all(t is None for t in arguments[4:9]):
        shapes = Shapes({0: kept}, {3: 1}, takes=None if spec.plain else _OF_PLAIN, fewest=fewest)
        _launch_cache[spec.kind] = added(_launch_cache.get(spec.kind), run, (*arguments[:4], arguments[9]), shapes)


def _spec(call, heads, arguments, width):
    x, _, _, y, *_ = arguments
    x_, weight, bias, _, residual, total = (None if t is None else dtypes.name_of(t.dtype) for t in arguments[:6])
    out = None if y.dtype == x.dtype else dtypes.name_of(y.dtype)
    return NormSpec(call.kind, x.shape[-1], x_, weight, bias, width, residual, total, out, call.scale,
                    bool(call.offset), call.stats, heads)


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
