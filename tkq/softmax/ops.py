"""tkq.softmax and tkq.log_softmax: from torch tensors to a launch."""
import torch
from torch import Tensor

from .. import runtime
from ..reference import losses as reference
from ..rows.one_pass import plan as row_plan
from ..runtime import arguments
from ..runtime.call import alloc, check, dtypes, ops
from ..runtime.call.dispatch import Shapes, added
from ..runtime.call.replay import CallCache
from ..runtime.device import arch
from .plan import plan
from .spec import MAX_N, SoftmaxSpec

_LAST = -1  # the dim of most calls: the same object, as Python has one of each small int, and not -1.0, which is equal
_MAX_ROWS = 1 << 30  # of one launch: the kernel counts rows in 32 bits

# For a forward, log -> a dispatcher of launchers; for a backward, what a call looks like -> its launcher. They take
# whole 16-byte accesses, and refuse what they cannot take, so that a hit needs no check of its own.
_launch_cache: dict = {}
_call_cache = CallCache()
_NAMES = "softmax", "log_softmax"
_TENSORS, _SCALE = ({name: arguments.checker(name, argument) for name in _NAMES} for argument in ("x", "scale"))
_OPTIONS = {name: arguments.checker(name, "dim", "scale") for name in _NAMES}
_launchers: dict = {}  # what a call looks like, with addresses -> (its launcher, whether it is such a one)


def softmax(x: Tensor, *, dim: int = -1, scale: float = 1.0) -> Tensor:
    """exp(scale * x) / sum(exp(scale * x)) over a dimension; differentiable once, in x.

    Computed in float32, below the largest value, and rounded once.

    Args:
        x: any shape with N from 1 to 262144 along dim; bf16, fp16 or fp32. In the last dimension, rows may be any
            distance apart and begin anywhere: a view x[:, 3:N] is read in place. Rows that are not contiguous, and
            leading dimensions that no single row stride describes, are copied first.
        dim: another one than the last is moved there: that costs a copy, unless it is contiguous in memory, and the
            result is a view with the dimensions moved back.
        scale: a finite number; multiplies x before.

    Returns:
        A tensor of x's shape and type, contiguous for the last dimension. A row of scale * x that is -inf
        throughout, or has a NaN or +inf, is NaN throughout, as torch.softmax has it.

    Raises:
        TypeError: x is no dense tensor of bf16, fp16 or fp32; dim is no int; scale is no number.
        ValueError: a number that is not finite in float32; no dimension, or none of it.
        IndexError: a dim that x does not have.
        NotImplementedError: N > 262144.
        RuntimeError: a GPU other than Hopper.

    CPU tensors take ``tkq.reference.losses.softmax``.

    Example::

        x = torch.randn(32, 1000, device="cuda", dtype=torch.bfloat16)
        y = tkq.softmax(x, scale=0.5)  # (32, 1000) bfloat16
    """
    return _softmax(x, dim, scale, False)


def log_softmax(x: Tensor, *, dim: int = -1, scale: float = 1.0) -> Tensor:
    """scale * x - log(sum(exp(scale * x))) over a dimension; differentiable once, in x.

    Computed in float32, below the largest value, and rounded once.

    Args:
        x: any shape with N from 1 to 262144 along dim; bf16, fp16 or fp32. In the last dimension, rows may be any
            distance apart and begin anywhere: a view x[:, 3:N] is read in place. Rows that are not contiguous, and
            leading dimensions that no single row stride describes, are copied first.
        dim: another one than the last is moved there: that costs a copy, unless it is contiguous in memory, and the
            result is a view with the dimensions moved back.
        scale: a finite number; multiplies x before.

    Returns:
        A tensor of x's shape and type, contiguous for the last dimension. A row that is -inf throughout, or has a NaN
        or +inf, is NaN throughout, as torch.log_softmax has it, of scale * x.

    Raises:
        TypeError: x is no dense tensor of bf16, fp16 or fp32; dim is no int; scale is no number.
        ValueError: a number that is not finite in float32; no dimension, or none of it.
        IndexError: a dim that x does not have.
        NotImplementedError: N > 262144.
        RuntimeError: a GPU other than Hopper.

    CPU tensors take ``tkq.reference.losses.softmax`` with ``log``.

    Example::

        x = torch.randn(32, 1000, device="cuda", dtype=torch.bfloat16)
        y = tkq.log_softmax(x)  # (32, 1000) bfloat16
    """
    return _softmax(x, dim, scale, True)


def _softmax(x, dim, scale, log):
    if dim is _LAST and not ops.traced():
        found = _call_cache.take(x, scale, log)
        if found is not None:
            return found
    dim, scale = _OPTIONS[_name(log)](dim, scale)
    if dim != _LAST:
        return _along(x, dim, scale, log)
    mode = ops.route(x)
    if mode == "direct":
        return (_launch if x.is_cuda else _on_cpu)(x, scale, log)
    if mode == "record":
        return _Recorded.apply(x, scale, log)
    check.refuse_tangent(_name(log), x=x)
    _check(x, scale, log)  # here too: the dispatcher's own words name no argument
    return _op(x, scale, log)


def _name(log):
    return "log_softmax" if log else "softmax"  # torch 2.11 does not trace a flag that indexes


def _along(x, dim, scale, log):
    _check_tensor(x, log)
    if not -x.dim() <= dim < x.dim():
        raise IndexError(f"dim: got {arguments.came(dim)} for x of {x.dim()} dimensions, allowed are {-x.dim()} to "
                         f"{x.dim() - 1}")
    if dim == x.dim() - 1:
        return _softmax(x, _LAST, scale, log)
    return _softmax(x.movedim(dim, -1), _LAST, scale, log).movedim(-1, dim)


# ---- launches -------------------------------------------------------------------------------------------------------


def _launch(x: Tensor, scale: float, log: bool) -> Tensor:
    """Run the kernel, with as little Python as it takes."""
    y = None
    try:
        if x.is_contiguous():
            shape = tuple(x.shape)
            y = alloc.empty(x.get_device(), shape, (shape[1], 1) if len(shape) == 2 else x.stride(), x.dtype)
            run = _launch_cache[log]
            run(x, y, scale)
            _call_cache.add((x, scale, log), run, (x, y, scale), y)
            return y
    except Exception:  # nothing is known, or it was refused
        pass
    return _carefully(x, scale, log, y)


def _launch_backward(y: Tensor, dy: Tensor, scale: float, log: bool) -> Tensor:
    """The gradient of x."""
    dx = None
    try:
        index, dtype = y.get_device(), y.dtype
        M, N = y.shape  # other shapes are not so frequent
        run = _launch_cache[log, index, dtype, N]
        if y.is_contiguous() and 0 < M <= _MAX_ROWS:
            dx = alloc.empty(index, (M, N), (N, 1), dtype)
            run(y, dy, dx, scale)
            return dx
    except Exception:
        pass
    return _backward_carefully(y, dy, scale, log, dx)


def _carefully(x, scale, log, out=None):
    """out: a contiguous tensor like x to write to, where there is one."""
    _check_tensor(x, log)
    rows = _rows(x)
    if out is None:
        out = torch.empty_like(x) if x.is_contiguous() else torch.empty(*x.shape, dtype=x.dtype, device=x.device)
    _run(rows, (rows, out if rows is x else out.view_as(rows)), scale, log, False)
    return out


def _backward_carefully(y, dy, scale, log, out=None):
    """out: as in ``_carefully``."""
    if dy.shape != y.shape or dy.dtype != y.dtype or dy.device != y.device:
        raise ValueError(f"dy: is {tuple(dy.shape)} {dy.dtype} on {dy.device}, expected {tuple(y.shape)} {y.dtype} on "
                         f"{y.device}, as y")
    _check(y, scale, log)
    _check_tensor(dy, log)
    rows, grads = _rows(y), _rows(dy)
    if out is None:
        out = torch.empty(*y.shape, dtype=y.dtype, device=y.device)
    _run(rows, (rows, grads, out if rows is y else out.view_as(rows)), scale, log, True)
    return out


def _rows(x):
    """x as (M, N), its last dimension contiguous."""
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        x = x.contiguous()
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _run(x, tensors, scale, log, backward):
    key = (log, backward, x.dtype, x.shape[1], x.device, *[(t.data_ptr() & 15, t.stride(0) & 7) for t in tensors])
    if key not in _launchers:
        _launchers[key] = _launcher(x, tensors, scale, log, backward)
    run, whole = _launchers[key]
    if whole:
        _remember(run, (*tensors, scale), log, backward)
    rows = x.shape[0]
    if 0 < rows <= _MAX_ROWS:
        run(*tensors, scale)
    elif rows:
        for parts in zip(*[t.split(_MAX_ROWS) for t in tensors], strict=True):
            run(*parts, scale)


def _launcher(x, tensors, scale, log, backward):
    arch.require_hopper(x.device)
    size = x.element_size()
    vector, shifted = row_plan.access(x.shape[1], size, [(t.data_ptr(), t.stride(0) * size) for t in tensors])
    spec = SoftmaxSpec(x.shape[1], dtypes.name_of(x.dtype), vector, log, backward, shifted)
    run = runtime.function(recipe(spec))
    return run, vector * size == 16 and not shifted


def _remember(run, given, log, backward):
    if backward:
        x = given[0]
        _launch_cache[log, x.get_device(), x.dtype, x.shape[1]] = run
    else:
        _launch_cache[log] = added(_launch_cache.get(log), run, given, Shapes({0: 1}, {1: 1}))


def recipe(spec: SoftmaxSpec, config=None):
    """The recipe of a spec, with its planned config or another one."""
    kernel = "backward:SoftmaxBackward" if spec.backward else "forward:Softmax"
    return runtime.Recipe(f"tkq.softmax.{kernel}", (spec, config or plan(spec)))


# ---- checks, the CPU, what the dispatcher sees ----------------------------------------------------------------------


def _check(x, scale, log):
    """Raises what the public functions promise."""
    _check_tensor(x, log)
    _SCALE[_name(log)](scale)


def _check_tensor(x, log):
    _TENSORS[_name(log)](x)
    if x.dim() == 0 or x.shape[-1] < 1:
        raise ValueError(f"x: got shape {tuple(x.shape)}, allowed are (..., N) with N of 1 and more")
    if x.shape[-1] > MAX_N:
        raise NotImplementedError(f"x: got N = {x.shape[-1]} columns, allowed are 1 to {MAX_N}")


def _on_cpu(x: Tensor, scale: float, log: bool) -> Tensor:
    _check(x, scale, log)
    return reference.softmax(x, scale, log).contiguous()


def _on_cpu_backward(y: Tensor, dy: Tensor, scale: float, log: bool) -> Tensor:
    return reference.softmax_backward(y, dy, scale, log).contiguous()


def _cuda(x: Tensor, scale: float, log: bool) -> Tensor:
    y = _call_cache.take(x, scale, log)
    if y is not None:
        return y
    _SCALE[_name(log)](scale)  # of the dispatcher, which no public function has looked at
    return _launch(x, scale, log)


def _cuda_backward(y: Tensor, dy: Tensor, scale: float, log: bool) -> Tensor:
    return _launch_backward(y, dy, scale, log)


def _fake(x: Tensor, scale: float, log: bool) -> Tensor:
    _check(x, scale, log)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _fake_backward(y: Tensor, dy: Tensor, scale: float, log: bool) -> Tensor:
    return torch.empty(y.shape, dtype=y.dtype, device=y.device)


def _setup(ctx, inputs, output):
    _, ctx.scale, ctx.log = inputs
    ctx.save_for_backward(output)


def _backward(ctx, dy):
    y, = ctx.saved_tensors
    call = _op_backward
    if ops.route(y, dy) != "op":
        call = _launch_backward if y.is_cuda else _on_cpu_backward
    return call(y, dy, ctx.scale, ctx.log), None, None


def _record(ctx, x, scale, log):
    """The same in plain eager mode, past the dispatcher."""
    y = (_cuda if x.is_cuda else _on_cpu)(x, scale, log)
    ctx.scale, ctx.log = scale, log
    ctx.save_for_backward(y)
    return y


_op = ops.torch_op("softmax", cuda=_cuda, cpu=_on_cpu, fake=_fake, setup=_setup, backward=_backward,
                   of="softmax, log_softmax")
_op_backward = ops.torch_op("softmax_backward", cuda=_cuda_backward, cpu=_on_cpu_backward, fake=_fake_backward)
_Recorded = ops.eager_function("Softmax", forward=_record, backward=_backward, of="softmax, log_softmax")
