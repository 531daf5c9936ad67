"""From torch tensors to cross entropy's launches, for its own functions and those of the linear layer."""
import math

import torch
from torch import Tensor

from .. import runtime
from ..reduction import geometry
from ..reference.losses import Terms
from ..rows.one_pass import plan as row_plan
from ..runtime.call import alloc, counters, dtypes
from ..runtime.call.debug import enabled
from ..runtime.call.dispatch import Shapes, added
from ..runtime.call.replay import CallCache
from ..runtime.device import arch
from .checks import check_call, check_targets
from .plan import SINGLE_LAUNCH_ROWS, TotalConfig, plan, scale, single_launch
from .spec import MAX_ROWS, CrossEntropySpec, ReduceSpec, ScaleSpec

# What a call looks like, addresses aside -> its launcher, if that takes whole 16-byte accesses. It refuses what it
# cannot take, so that a hit needs no check of its own. Of forwards, dispatchers too, by what these do not look at.
_launch_cache: dict = {}
call_cache = CallCache(by_stream=True)  # of `forward`, past `enabled`
_launchers: dict = {}  # with addresses -> any launcher
# where a launch that makes the total has a counter and, at 16 bytes, its losses:
# `single_launch.CrossEntropySingleLaunch`
_SCRATCH = 4 + SINGLE_LAUNCH_ROWS


def forward(logits: Tensor, target: Tensor, terms: tuple, save: bool = True) -> tuple:
    """(loss, what a backward needs: see `class_rows.Saved`), with as little Python as it takes. terms: the fields of a
    Terms. save False: the second one is not needed: None, or memory that the reduction took."""
    weight, ignore_index, reduction, smoothing, z_loss, softcap = terms
    each = reduction == "none"
    try:
        shape = logits.shape
        M = shape[0] if len(shape) == 2 else math.prod(shape[:-1])
        one = not each and single_launch(M, shape[-1], reduction)
        run = _launch_cache[reduction, smoothing != 0, softcap != 0, save or not (each or one), one]
        if M <= MAX_ROWS and 0 <= smoothing <= 1 and not enabled():
            index = logits.get_device()
            make, saved, scratch = alloc.maker(index), None, None
            if each:
                sizes = tuple(target.shape)
                if save:
                    saved = make((2 * M + 2,), (1,), torch.float32)
                loss = make(sizes, (1,) if len(sizes) == 1 else alloc.strides(sizes), torch.float32)
            else:
                if save or not one:
                    saved = make((3 * M + 2,), (1,), torch.float32)
                loss = make((), (), torch.float32)
                if one:
                    scratch = counters.with_scratch(index, _SCRATCH)
            arguments = logits, target, weight, loss, saved, scratch, None, ignore_index, smoothing, z_loss, softcap
            run(*arguments)
            call_cache.add((logits, target, *terms, save), run, arguments, (loss, saved), constants=(scratch,))
            return loss, saved
    except Exception:  # nothing is known, or it was refused
        pass
    return _carefully(logits, target, Terms(*terms), save)


def _carefully(logits, target, terms, save):
    check_call(logits, target, terms)
    x, index = rows(logits), flat(target)
    if enabled():
        check_targets(target, x.shape[1], terms.ignore_index)
    M, each, like = x.shape[0], terms.reduction == "none", dict(dtype=torch.float32, device=x.device)
    one = single_launch(*x.shape, terms.reduction)
    save = save or not (each or one)
    saved = torch.empty(saved_size(M, terms.reduction), **like) if save else None
    if not M:
        return torch.full(target.shape if each else (), 0.0 if terms.reduction == "sum" else torch.nan, **like), saved
    loss = torch.empty(target.shape if each else (), **like)
    run = launcher("forward", x, index, terms, terms.reduction, save=save, one=one)
    scratch = counters.with_scratch(x.get_device(), _SCRATCH) if one else None
    given = x, index, terms.weight, flat(loss) if each else loss, saved, scratch, None, *terms[1:2], *terms[3:]
    if _launch_cache.get(_key("forward", x, index, terms, terms.reduction, save, one)) is run:
        place = terms.reduction, terms.label_smoothing != 0, terms.softcap != 0, save, one
        _launch_cache[place] = added(_launch_cache.get(place), run, given, Shapes({0: 1, 1: 0}, {3: 0} if each else {}))
    run(*given)
    return loss, saved


def saved_size(M: int, reduction: str) -> int:
    """Numbers that a forward saves: `class_rows.Saved`, and the losses where they are reduced."""
    return 2 * M + 2 if reduction == "none" else 3 * M + 2


def backward(logits: Tensor, target: Tensor, dloss: Tensor, saved: Tensor, terms: tuple,
             inplace: bool = False) -> Tensor:
    """The logits' gradient, written over them or into a new tensor."""
    weight, ignore_index, reduction, smoothing, z_loss, softcap = terms
    to = None
    try:
        index, dtype = logits.get_device(), logits.dtype
        M, N = logits.shape
        run = _launch_cache[index, "backward", dtype, N, target.dtype, weight is not None and weight.dtype, reduction,
                            smoothing != 0, softcap != 0, True, False]
        if M and logits.is_contiguous():
            to = logits if inplace else alloc.empty(index, (M, N), (N, 1), dtype)
            run(logits, target, weight, dloss, saved, None, to, ignore_index, smoothing, z_loss, softcap)
            return to
    except Exception:
        pass
    return _backward_carefully(logits, target, dloss, saved, Terms(*terms), inplace, to)


def _backward_carefully(logits, target, dloss, saved, terms, inplace, result=None):
    """result: a contiguous tensor like logits (M, N) to write to, where there is one."""
    x, index = rows(logits), flat(target)
    if inplace:
        result, to = logits if x.data_ptr() == logits.data_ptr() else x.view_as(logits), x
    else:
        if result is None:
            result = torch.empty_strided(logits.shape, gradient_stride(logits), dtype=x.dtype, device=x.device)
        to = rows(result)
    if x.shape[0]:
        dloss = dloss if dloss.dim() < 2 and (terms.reduction != "none" or dloss.dim()) else dloss.reshape(-1)
        run = launcher("backward", x, index, terms, terms.reduction, to)
        run(x, index, terms.weight, dloss, saved, None, to, *terms[1:2], *terms[3:])
    return result


def gradient_stride(logits: Tensor) -> tuple:
    """Strides of a new gradient: its rows are as far apart as the logits' where those have a little room behind, so
    that both can be read and written by the same accesses; else contiguous."""
    V = logits.shape[-1]
    step = logits.stride(-2) if logits.dim() > 1 and V < logits.stride(-2) <= V + V // 8 else V
    strides = [1]
    for n in reversed(logits.shape[:-1]):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def rows(logits: Tensor) -> Tensor:
    """Logits as (M, V)."""
    return logits if logits.dim() == 2 else logits.reshape(-1, logits.shape[-1])


def flat(target: Tensor) -> Tensor:
    """Targets as (M,), contiguous."""
    return target if target.dim() == 1 and target.stride(0) == 1 else target.reshape(-1).contiguous()


def launcher(kind: str, x: Tensor, target: Tensor, terms: Terms, reduction: str, gradient=None, part: bool = False,
             save: bool = True, one: bool = False):
    """The compiled kernel for logits (M, V), their targets and, but for a forward, their gradient."""
    given = (x,) if gradient is None or gradient is x else (x, gradient)
    kind_of_call = _key(kind, x, target, terms, reduction, save, one)
    key = (*kind_of_call, part, *[(t.data_ptr() & 15, t.stride(0) & 7) for t in given])
    run = _launchers.get(key)
    if run is None:
        if x.shape[0] > MAX_ROWS:
            raise NotImplementedError(f"logits: got {x.shape[0]} rows, allowed are at most {MAX_ROWS}")
        spec = _spec(kind_of_call, x, given, part)
        run = _launchers[key] = runtime.function(recipe(spec))
        if spec.vector * spec.width == 128 and not spec.shifted and not part:
            _launch_cache[kind_of_call] = run
    return run


def _key(kind, x, target, terms, reduction, save, one):
    return (x.get_device(), kind, x.dtype, x.shape[1], target.dtype, terms.weight is not None and terms.weight.dtype,
            reduction, terms.label_smoothing != 0, terms.softcap != 0, save, one)


def _spec(kind_of_call, x, given, part):
    _, kind, dtype, N, target, weight, reduction, smoothing, softcap, save, one = kind_of_call
    arch.require_hopper(x.device)
    size = x.element_size()
    vector, shifted = row_plan.access(N, size, [(t.data_ptr(), t.stride(0) * size) for t in given])
    return CrossEntropySpec(kind, N, dtypes.name_of(dtype), dtypes.name_of(target),
                            dtypes.name_of(weight) if weight else None, reduction, smoothing, softcap, vector, shifted,
                            part, save, one)


def recipe(spec: CrossEntropySpec, config=None):
    """The recipe of a spec, with its planned config or another one."""
    kernel = "single_launch:CrossEntropySingleLaunch" if spec.once else "forward:CrossEntropy"
    if spec.kind == "backward":
        kernel = "backward:CrossEntropyBackward"
    return runtime.Recipe(f"tkq.losses.{kernel}", (spec, config or plan(spec)))


def both(logits: Tensor, target: Tensor, terms: Terms, inplace: bool) -> tuple:
    """(loss, its gradient for logits) of a mean or sum, in one pass over the logits. inplace: no two of them share
    memory."""
    x, index = rows(logits), flat(target)
    M, like = x.shape[0], dict(dtype=torch.float32, device=x.device)
    if enabled():
        check_targets(target, x.shape[1], terms.ignore_index)
    gradient = logits if inplace else torch.empty_strided(logits.shape, gradient_stride(logits), dtype=x.dtype,
                                                          device=x.device)
    loss, losses, saved = torch.empty((), **like), torch.empty(M, **like), torch.empty(2 * M + 2, **like)
    if not M:
        return loss.fill_(0.0 if terms.reduction == "sum" else torch.nan), gradient
    all = None
    if terms.reduction == "mean":
        all = torch.empty(2, **like)
        total(None, index, terms, None, all)
    to = x if inplace else rows(gradient)
    part_forward(x, index, terms, losses, saved, all, to)
    total(losses, index, terms, loss, all)
    if inplace and x.data_ptr() != logits.data_ptr():  # logits that had to be copied to be rows
        logits.copy_(x.view(logits.shape))
    elif inplace:
        torch.autograd.graph.increment_version(logits)  # a backward that saved them raises
    return loss, gradient


# ---- parts of the rows ----------------------------------------------------------------------------------------------


def total(losses, target: Tensor, terms: Terms, loss, all) -> None:
    """loss () = the sum of losses (M,), divided where the reduction is a mean; all[0] = 1 / what it is divided by.
    losses and loss None: only that. all None: not that, and the reduction is a sum."""
    mean = terms.reduction == "mean"
    key = ("total", mean, losses is None, target.dtype, terms.weight is not None and terms.weight.dtype, target.device)
    run = _launchers.get(key)
    if run is None:
        arch.require_hopper(target.device)
        weight = None if terms.weight is None else dtypes.name_of(terms.weight.dtype)
        spec = ReduceSpec(mean, losses is not None, *((dtypes.name_of(target.dtype), weight) if mean else ()))
        run = _launchers[key] = runtime.function(reduce_recipe(spec))
    run(losses, target if mean else None, terms.weight if mean else None, loss, all if mean else None,
        terms.ignore_index)


def reduce_recipe(spec: ReduceSpec, config=None):
    """The recipe of a reduction over rows."""
    return runtime.Recipe("tkq.losses.reduce:Total", (spec, config or TotalConfig()))


def scale_(x: Tensor, factor: Tensor) -> Tensor:
    """x (M, N) *= factor (), in place; no more than a look at the factor where that is 1."""
    key = ("scale", x.dtype, x.shape[1], x.device, x.data_ptr() & 15, x.stride(0) & 7)
    run = _launchers.get(key)
    if run is None:
        arch.require_hopper(x.device)
        size = x.element_size()
        vector = geometry.vector(x.shape[1], 8 * size)
        while (x.data_ptr() | x.stride(0) * size) % (vector * size):
            vector //= 2
        spec = ScaleSpec(x.shape[1], dtypes.name_of(x.dtype), vector)
        run = _launchers[key] = runtime.function(scale_recipe(spec))
    if x.shape[0]:
        run(x, factor)
    return x


def scale_recipe(spec: ScaleSpec):
    """The recipe of a multiplication in place."""
    return runtime.Recipe("tkq.losses.backward:Scale", (spec, scale(spec)))


def part_forward(x, target, terms, losses, saved, all, gradient=None) -> None:
    """The losses of some rows (m, V) into losses (m,), what a backward needs of them into saved (2 m,), and, times
    all[0], their gradient, which may be x. Without `all`, saved is (2 m + 2,), and the gradient times 1."""
    kind = "forward" if gradient is None else "fused"
    run = launcher(kind, x, target, terms, "none", gradient, all is not None)
    run(x, target, terms.weight, losses, saved, all, gradient, *terms[1:2], *terms[3:])


def part_backward(x, target, terms, dloss, saved, all) -> None:
    """The gradient of some rows, over them. dloss: (m,), or () where the loss was reduced."""
    run = launcher("backward", x, target, terms, terms.reduction, x, True)
    run(x, target, terms.weight, dloss, saved, all, x, *terms[1:2], *terms[3:])
