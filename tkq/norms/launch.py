"""From torch tensors to a launch of a norm's kernel.

A call first takes the launcher that the last call of its kind took, for accesses as wide as N allows, and leaves every
check to the compiled function: dtypes, shapes, strides, addresses and devices. Only where that refuses, or nothing is
known yet, the call is looked at closely (`_carefully`): the words for a user, or the launcher for narrower accesses.
"""
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from .. import runtime
from ..runtime import arch, dtypes
from . import checks
from .plan import plan
from .spec import GROUP, NormSpec

_MAX_ROWS = 1 << 30  # of one launch: the kernel counts rows in 32 bits

_known: dict = {}  # what a kind of call looks like, without addresses -> its launcher; None where addresses decide
_launchers: dict = {}  # the same and the vector -> launcher


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


class Results(NamedTuple):
    """y and total have x's shape, rstd and mean (rows,), scale (rows, 1 or groups). None for what was not asked for."""

    y: Tensor
    total: Optional[Tensor] = None
    rstd: Optional[Tensor] = None
    mean: Optional[Tensor] = None
    scale: Optional[Tensor] = None


def recipe(spec: NormSpec, config=None):
    """The recipe of a spec, with its planned config or another one."""
    return runtime.Recipe("tkq.norms.build:build", (spec, config or plan(spec)))


# ---- without options ----------------------------------------------------------------------------------------


def plain(kind: str, x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], eps: float,
          out: Optional[Tensor] = None) -> Tensor:
    """y alone. out: a contiguous tensor like x to write to, for whoever owns the memory."""
    try:
        rows = x if x.dim() == 2 else x.view(-1, x.shape[-1])
        M, N = rows.shape
        run = _known[kind, x.dtype, N, None if weight is None else weight.dtype, None if bias is None else bias.dtype]
        if 0 < M <= _MAX_ROWS:
            y = _like(x) if out is None else out
            run(rows, weight, bias, y if rows is x else y.view(M, N), eps)
            return y
    except Exception:
        checks.norm(kind, x, weight, bias)
    return _carefully(Call(kind, eps), x, weight, bias, None, out).y


def _like(x):
    return torch.empty_like(x) if x.is_contiguous() else torch.empty(x.shape, dtype=x.dtype, device=x.device)


# ---- with options -------------------------------------------------------------------------------------------


def norm(call: Call, x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor],
         residual: Optional[Tensor]) -> Results:
    """All that the call asks for, in new tensors."""
    try:
        return _at_once(call, x, weight, bias, residual)
    except Exception:
        checks.norm(call.kind, x, weight, bias, residual, None if call.scale else call.out, call.total)
    return _carefully(call, x, weight, bias, residual)


def _at_once(call, x, weight, bias, residual):
    """Raises where nothing is known yet, or the compiled function refuses."""
    rows, heads = _rows(x, residual, weight)
    run = _known[_kind_of(call, x, weight, bias, residual, heads)]
    if not 0 < x.numel() <= _MAX_ROWS:  # so many elements are no more rows
        raise ValueError
    results = _allocate(call, x)
    run(*_arguments(call, rows, weight, bias, results))
    return results


def _kind_of(call, x, weight, bias, residual, heads):
    return (call.kind, call.out, call.total, call.stats, call.scale, not call.offset, heads, x.dtype, x.shape[-1],
            None if weight is None else weight.dtype, None if bias is None else bias.dtype,
            None if residual is None else residual.dtype)


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
    shape = (-1, *t.shape[-kept:])
    if copy:
        return t.reshape(shape)
    try:
        return t.view(shape)
    except RuntimeError:
        return None


def _allocate(call, x):
    M = x.numel() // x.shape[-1]
    y = torch.empty(x.shape, dtype=call.out or x.dtype, device=x.device)
    total = None if call.total is None else torch.empty(x.shape, dtype=call.total, device=x.device)
    rstd = torch.empty(M, dtype=torch.float32, device=x.device) if call.stats else None
    mean = torch.empty(M, dtype=torch.float32, device=x.device) if call.stats and call.kind == "layernorm" else None
    return Results(y, total, rstd, mean, None if call.scale is None else _scales(call.scale, M, x))


def _scales(granularity, M, x):
    if granularity == "row":
        return torch.empty(M, 1, dtype=torch.float32, device=x.device)
    groups, padded = -(-x.shape[-1] // GROUP), -(-M // 4) * 4
    return torch.empty(groups, padded, dtype=torch.float32, device=x.device).t()[:M]


def _arguments(call, rows, weight, bias, results):
    """As `build` has them, for a spec with options."""
    x, residual = rows
    shape = (-1, x.shape[-1])
    y, total = (t if t is None or t.dim() == 2 else t.view(shape) for t in (results.y, results.total))
    return (x, weight, bias, y, residual, total, results.rstd, results.mean, results.scale, call.eps,
            call.offset or None)


# ---- the first call of a kind -------------------------------------------------------------------------------


def _carefully(call, x, weight, bias, residual, out=None):
    """Find the launcher, compile it where it is new, and call it. `out` takes the place of y."""
    checks.norm(call.kind, x, weight, bias, residual, None if call.scale else call.out, call.total)
    arch.require_hopper(x.device)
    rows, heads = _rows(x, residual, weight)
    results = _allocate(call, x) if out is None else Results(out)
    if not results.y.numel():
        return results
    arguments = _arguments(call, rows, weight, bias, results)
    spec = _spec(call, heads, arguments)
    key = _key(call, x, weight, bias, residual, heads)
    run = _launchers.get((key, spec.vector))
    if run is None:
        run = _launchers[key, spec.vector] = runtime.function(recipe(spec))
    _known[key] = run if spec.vector == spec.widest and _known.get(key, run) is not None else None
    if spec.plain:
        arguments = (*arguments[:4], call.eps)
    for part in _parts(arguments):
        run(*part)
    return results


def _key(call, x, weight, bias, residual, heads):
    if residual is None and heads is None and call == Call(call.kind, call.eps):
        return (call.kind, x.dtype, x.shape[-1], None if weight is None else weight.dtype,
                None if bias is None else bias.dtype)
    return _kind_of(call, x, weight, bias, residual, heads)


def _spec(call, heads, arguments):
    x, weight, bias, y, residual, total = arguments[:6]
    names = [None if t is None else dtypes.name_of(t.dtype) for t in (x, weight, bias, residual, total)]
    out = None if y.dtype == x.dtype else dtypes.name_of(y.dtype)
    return NormSpec(call.kind, x.shape[-1], names[0], names[1], names[2],
                    _vector([t for t in (x, residual, y, total) if t is not None], (weight, bias)), names[3], names[4],
                    out, call.scale, bool(call.offset), call.stats, heads)


def _vector(streams, vectors=()) -> int:
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
