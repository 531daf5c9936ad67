"""From torch tensors to a launch of a norm's kernel: validate, spec, plan, launch.

A call first takes the launcher that the last call of its kind took, for accesses as wide as N allows, and leaves every
check of tensors to the compiled function: dtypes, shapes, strides, addresses and devices; leading dimensions to
`dispatch.added`. Only where these refuse, or nothing is known yet, `_first` takes the steps in turn: it raises
the words for a user, or finds the launcher, for narrower accesses too. Numbers are validated where they are passed in:
by the public functions and by the custom ops.
"""
import math
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from .. import runtime
from ..runtime.call import alloc, dtypes
from ..runtime.call.dispatch import Ended, Shapes, added
from ..runtime.call.replay import CallCache
from ..runtime.device import clusters
from . import checks, fp8_persistent_plan, persistent_plan
from .alignment import vector
from .plan import plan
from .spec import GROUP, NormSpec

_MAX_ROWS = 1 << 30  # of one launch: the kernel counts rows in 32 bits

_launch_cache: dict = {}  # (kind, scale) -> dispatcher of launchers for whole accesses; see `norm`
_call_cache = CallCache()  # of `replayed`
_launchers: dict = {}  # what a call looks like, and the elements of an access -> (its spec, its launcher)
_OF_NORM = (0, 1, 2, 3, 9)  # the places in a call of a launcher's arguments, where that is one without options


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

    @property
    def op(self) -> str:
        """The public function that asks for it."""
        return self.kind if self.scale is None else f"{self.kind}_quant"


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
    kernel = "PlainNorm" if spec.plain else "NormWithOptions"
    return runtime.Recipe(f"tkq.norms.forward.kernel:{kernel}", (spec, config or plan(spec)))


def compiled(spec: NormSpec, device):
    """What runs a spec on a device, called as `forward.arguments` has them."""
    for planner in (persistent_plan, fp8_persistent_plan):
        row_plan = planner.planned(spec)
        if row_plan is not None:
            units = row_plan.min_blocks_per_sm * clusters.resident(device, row_plan.cluster, row_plan.block)
            return Ended(runtime.function(planner.recipe(spec, row_plan)), units)
    return runtime.function(recipe(spec))


# ---- calls that came before ----------------------------------------------------------------------------------


def norm(call: tuple, x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], residual: Optional[Tensor],
         made: Optional[Results] = None) -> Results:
    """All that the call asks for, with as little Python as it takes. call: a Call, or the plain tuple of its fields;
    its numbers have been validated. made: what to write to, as `allocate` makes it, for the owner of the memory."""
    try:
        if made is None:
            made = allocate(call, x)
        y, total, rstd, mean, scale = made
        launch = _launch_cache[call[0], call[6]]
        launch(x, weight, bias, y, residual, total, rstd, mean, scale, call[1], call[2] or None)
        return made
    except Exception:  # nothing is known, or it was refused
        pass
    return _first(Call(*call), x, weight, bias, residual, made)


def replayed(call: tuple, x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], residual: Optional[Tensor],
             validate=None) -> Results:
    """The same, for eager calls of which autograd keeps the results, and for the custom ops'. validate: a function of
    eps, where nothing has looked at it before; a call that is replayed has one that it allowed."""
    found = _call_cache.take(x, weight, bias, residual, *call)
    if found is None:
        if validate is not None:
            validate(call[1])
        found = norm(call, x, weight, bias, residual)
        remember(_call_cache, (x, weight, bias, residual, *call), call, (x, weight, bias, residual), found, found)
    return found


def remember(calls: CallCache, given: tuple, call: tuple, tensors: tuple, made: Results, found) -> None:
    """Let a call that has been launched be replayed. given: what `calls.take` gets; found: what the caller gets."""
    x, weight, bias, residual = tensors
    y, total, rstd, mean, scale = made
    calls.add(given, _launch_cache.get((call[0], call[6])),
              (x, weight, bias, y, residual, total, rstd, mean, scale, call[1], call[2] or None), found)


def allocate(call: tuple, x: Tensor) -> Results:
    """New tensors for what a call asks for."""
    _, _, _, out, total, stats, scale = call
    shape, stride, make = alloc.layout_of(x)
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


# ---- the first call of a kind: validate, spec, plan, launch -----------------------------------------------------


def _first(call, x, weight, bias, residual, made):
    """made: the results, where that could be asked for before."""
    checks.norm(call.op, x, weight, bias, residual, launched=True)
    if call.stats:
        checks.gradient_of_heads(call.kind, x, weight)
    made = made or allocate(call, x)
    if not x.numel():
        return made
    rows, heads = _rows(x, residual, weight)
    arguments = _arguments(call, rows, weight, bias, made)
    spec, run = _launcher(call, heads, arguments)
    _remember(spec, run, arguments)
    for part in _parts(tuple(arguments[i] for i in _OF_NORM) if spec.plain else arguments):
        run(*part)
    return made


def _heads(x, residual, weight):
    """How rows are to be read: None, as (M, N); "weight", as (R, H, N), where each head has a weight of its own;
    "rows", the same, where they share one and their places take two strides."""
    if weight is not None and weight.dim() == 2:
        return "weight"
    if x.dim() < 3 or (x.is_contiguous() and (residual is None or residual.is_contiguous())):
        return None
    one, two = (all(t is None or alloc.one_stride(t, dims) is not None for t in (x, residual)) for dims in (1, 2))
    return "rows" if two and not one else None


def _rows(x, residual, weight):
    """((x, residual), heads): both as (M, N) or, for heads (see `_heads`), as (R, H, N). Copies only what that does not
    describe."""
    heads = _heads(x, residual, weight)
    row_dims = 1 if heads is None else 2
    return tuple(t if t is None or t.dim() == row_dims + 1 else t.reshape(-1, *t.shape[t.dim() - row_dims:])
                 for t in (x, residual)), heads


def _arguments(call, rows, weight, bias, made):
    """As `forward.arguments.with_options` has them."""
    x, residual = rows
    y, total, rstd, mean, scale = made
    if y.dim() != 2:
        y, total = (None if t is None else t.view(-1, x.shape[-1]) for t in (y, total))
    return x, weight, bias, y, residual, total, rstd, mean, scale, call.eps, call.offset or None


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


def _spec(call, heads, arguments, width):
    x, weight, bias, out, residual, total = dtypes.names(*arguments[:6])
    return NormSpec(call.kind, arguments[0].shape[-1], x, weight, bias, width, residual, total,
                    None if out == x else out, call.scale, bool(call.offset), call.stats, heads)


def _remember(spec, run, arguments):
    """For the calls that come next, where the launcher takes any address that torch gives to a new tensor."""
    if spec.vector != spec.widest:
        return
    row_dims, place = 2 if spec.heads else 1, (spec.kind, spec.scale)
    # rows that are one matrix are not for a kernel of heads, or what a call runs would depend on those before it
    shapes = Shapes({0: row_dims, 4: row_dims}, {3: 1, 5: 1}, takes=_OF_NORM if spec.plain else None,
                    fewest=spec.heads == "rows")
    _launch_cache[place] = added(_launch_cache.get(place), run, arguments, shapes)


def _parts(arguments):
    """The arguments of each launch: one, or several where one launch cannot take all rows."""
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
