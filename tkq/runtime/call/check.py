"""Checks of what a caller passed. Each error names the argument, what came and what is allowed; nothing is launched."""
import numbers
import sys

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..device import arch
from . import dtypes, memory

FLOAT32_END = 2.0**128 - 2.0**103  # kernels take numbers as float32: from here on they are infinite there
_creation = getattr(torch._C._autograd, "_get_creation_meta", None)  # of a view: which rules autograd has for it


def tensor(name: str, x) -> None:
    """TypeError unless x is a tensor, and a dense one: not sparse, nested or of MKL-DNN. (Dynamo, which does not trace
    that question in a backward, traces dense ones only.)"""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}, expected a torch.Tensor")
    if torch.compiler.is_dynamo_compiling():
        return
    if x.layout is not torch.strided or x.is_nested:
        raise TypeError(f"{name}: got a {'nested' if x.is_nested else x.layout} tensor, expected a dense one")


def settled(name: str, x) -> None:
    """What `tensor` asks, and ValueError where a view has a negation or a conjugation pending, or zeros have no memory:
    of a kernel that is launched on the memory as it lies."""
    tensor(name, x)
    if not torch.compiler.is_dynamo_compiling() and (x.is_neg() or x.is_conj() or x._is_zerotensor()):
        raise ValueError(f"{name}: is a view with a pending negation or conjugation, or zeros without memory; allowed "
                         "are tensors whose numbers lie in memory: call .resolve_neg(), .resolve_conj() or .clone()")


def dtype(name: str, x, allowed) -> None:
    """TypeError unless x is a tensor of one of the allowed types, given by their names (``"bf16"``)."""
    tensor(name, x)
    if dtypes.name_of(x.dtype) not in allowed:
        names = ", ".join(f"{dtypes.torch_type(a)} ({a})" for a in allowed)
        raise TypeError(f"{name}: dtype is {x.dtype}, allowed are {names}")


def rank(name: str, x: Tensor, *allowed: int) -> None:
    """ValueError unless x has one of the allowed numbers of dimensions."""
    if x.dim() not in allowed:
        wanted = " or ".join(map(str, allowed))
        raise ValueError(f"{name}: has {x.dim()} dimensions, shape {tuple(x.shape)}; allowed: {wanted}")


def shape(name: str, x: Tensor, expected: tuple) -> None:
    """ValueError unless x has this shape; None in it allows any size."""
    if not fits(x, expected):
        wanted = ", ".join("any" if want is None else str(want) for want in expected)
        raise ValueError(f"{name}: shape is {tuple(x.shape)}, expected ({wanted})")


def fits(x: Tensor, expected: tuple) -> bool:
    """Has x this shape, as `shape` takes it? Of another number of dimensions no size is looked at, as == of tuples
    does: a tracer would take what it sees for a rule."""
    return x.dim() == len(expected) and all(want is None or want == got for want, got in zip(expected, x.shape))


def is_traced(x) -> bool:
    """Is x a number that will be known when what is exported runs? Then its op asks for what is allowed.

    Not so within torch.compile and a strict export: Dynamo has numbers of Python, and guards what is asked of them."""
    return isinstance(x, (torch.SymFloat, torch.SymInt))


def plain_size(n):
    """A tensor's size as a number, for what takes no tensor in its place: torch.jit.trace has tensors, and keeps the
    number that it traces with."""
    return int(n) if isinstance(n, Tensor) else n


def number(name: str, x) -> None:
    """TypeError unless x is a number: Python's, or one that is traced."""
    if (isinstance(x, bool) or not isinstance(x, (int, float))) and not is_traced(x):
        raise TypeError(f"{name}: got {type(x).__name__}, expected a float")


def flag(name: str, x) -> None:
    """TypeError unless x is True or False; 0 and 1 are not."""
    if x is not True and x is not False:
        raise TypeError(f"{name}: got {x!r}, allowed are True and False")


def size(name: str, n, of: int = 1) -> None:
    """TypeError unless n is an int, ValueError unless it is a multiple of ``of``, above 0."""
    multiples = "from 1 on" if of == 1 else f"that are multiples of {of}"
    if isinstance(n, bool) or not isinstance(n, numbers.Integral):
        raise TypeError(f"{name}: got {n!r}, allowed are ints {multiples}")
    if n < 1 or n % of:
        raise ValueError(f"{name} is {n}, allowed are ints {multiples}")


def last_dim_contiguous(name: str, x: Tensor, empty: bool = False) -> None:
    """ValueError unless neighbours in the last dimension are neighbours in memory; TypeError if it is not a dense
    tensor, which is asked here, where it costs nothing: others have no strides. empty: of one without elements, too.
    """
    try:
        apart = x.dim() and x.shape[-1] > 1 and x.stride(-1) != 1 and (empty or x.numel())
    except RuntimeError:  # of a nested one
        _dense(name, x)
        raise
    if apart:
        _dense(name, x)
        raise ValueError(
            f"{name}: strides are {x.stride()}; the last dimension must be contiguous (stride 1): call .contiguous()")


def rows_of_16_bytes(op: str, /, empty: bool = False, **tensors: Tensor | None) -> None:
    """What TMA, and accesses of 16 bytes, cannot take.

    empty: tensors without elements are asked for their strides, too, as a launch takes them.

    Raises:
        ValueError: a last dimension that is not contiguous, another stride, or an address, that is no multiple of 16
            bytes.
    """
    for name, x in tensors.items():
        if x is not None and (x.numel() or empty) and not _plainly_in_rows(x):
            last_dim_contiguous(f"{op}: {name}", x, empty)
            strides_of_16_bytes(op, name, x, x.dim() - 1)


def _plainly_in_rows(x) -> bool:
    """Is it plain to see, at the least cost, that `rows_of_16_bytes` takes a tensor? No, where it is not sure."""
    try:
        *outer, last = x.stride()
        if last != 1 or x.data_ptr() % 16:
            return False
    except Exception:  # what has no strides, or no memory
        return False
    unit = 16 // x.element_size()
    return not any(n % unit for n in outer)


def strides_of_16_bytes(op: str, name: str, x: Tensor, line: int) -> None:
    """Likewise, of all dimensions but one, `line`, whose neighbours are neighbours in memory."""
    unit = 16 // x.element_size()
    for i in range(x.dim()):
        if i != line and x.stride(i) % unit and x.shape[i] > 1:
            raise ValueError(f"{op}: {name}: strides are {x.stride()}; stride {i} must be a multiple of {unit} "
                             "elements (16 bytes): call .contiguous()")
    if memory.address(x) % 16:
        raise ValueError(f"{op}: {name}: begins at an address that is not a multiple of 16 bytes: call .clone()")


def strides_fit_16_bytes(x: Tensor) -> bool:
    """Would `rows_of_16_bytes` take a tensor, wherever it begins? Raises nothing, so that tracers follow it, and asks
    inner dimensions first: a stride outside of them is their multiple, and its size says nothing then."""
    unit, inner = 16 // x.element_size(), x.dim() - 1
    fits = inner < 0 or x.stride(inner) == 1 or x.shape[inner] == 1
    return (fits and all(x.stride(i) % unit == 0 or x.shape[i] == 1 for i in reversed(range(inner)))) or not x.numel()


def _dense(name, x):
    if x.layout is not torch.strided or x.is_nested:
        raise TypeError(f"{name}: got a {'nested' if x.is_nested else x.layout} tensor, expected a dense one")


def rows(op: str, most: int, x: Tensor, vectors: dict, like: dict, launched: bool = False) -> None:
    """What a norm of rows asks of its tensors together, once each has been looked at: ValueError, NotImplementedError
    for more than `most` columns.

    x: (..., N), its last dimension contiguous. vectors, by name: (N,), contiguous; all (H, N), a row for each head of x
    (..., H, N), where the first of them has two dimensions. like, by name: tensors of x's shape, their last dimension
    contiguous. None among them is passed over. All are on one device; launched: one that the kernels run on."""
    if x.dim() == 0 or x.shape[-1] < 1:
        raise ValueError(f"{op}: x: got shape {tuple(x.shape)}, allowed are (..., N) with N of 1 and more")
    if x.shape[-1] > most:
        raise NotImplementedError(f"{op}: x: got N = {x.shape[-1]} columns, allowed are 1 to {most}")
    last_dim_contiguous("x", x)
    first = next(iter(vectors.values()))
    of_heads = first is not None and first.dim() == 2 and x.dim() > 1
    for name, t in vectors.items():
        if t is not None:
            shape(name, t, tuple(x.shape[-2:] if of_heads else x.shape[-1:]))
            if not t.is_contiguous():
                raise ValueError(f"{op}: {name}: strides are {t.stride()}, allowed is contiguous: call .contiguous()")
    for name, t in like.items():
        if t is not None:
            shape(name, t, tuple(x.shape))
            last_dim_contiguous(name, t)
    same_device(x=x, **vectors, **like)
    if launched:
        arch.require_hopper(x.device)


def each(*expected: tuple) -> None:
    """TypeError, ValueError unless each (name, tensor, names of types, shape) is one of these types, of this shape, its
    last dimension contiguous, and all are on one device."""
    for name, x, types, size in expected:
        dtype(name, x, types)
        shape(name, x, size)
        last_dim_contiguous(name, x)
    same_device(**{name: x for name, x, *_ in expected})


def same_device(**tensors) -> None:
    """TypeError, ValueError unless all are tensors on one device; None among them is passed over."""
    first = None
    for name, x in tensors.items():
        if x is None:
            continue
        if not isinstance(x, Tensor):
            tensor(name, x)
        if first is None:
            first = (name, x.device)
        elif x.device != first[1]:
            raise ValueError(f"{name}: is on {x.device}, but {first[0]} is on {first[1]}; all must be on one device")


def refuse_tangent(op_name: str, **tensors) -> None:
    """NotImplementedError where a tangent (forward mode) would be lost: no op has forward-mode gradients."""
    if forward_ad._current_level < 0:
        return
    for name, x in tensors.items():
        if isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(f"{op_name}: {name} carries a tangent, and {op_name} has no forward-mode "
                                      f"gradient; pass forward_ad.unpack_dual({name}).primal")


def importable(cls) -> None:
    """ValueError unless a class's module has it under its own name: the process that compiles imports it by that."""
    found = sys.modules.get(cls.__module__)
    for name in cls.__qualname__.split("."):
        found = getattr(found, name, None)
    if found is not cls:
        raise ValueError(f"{cls.__name__}: is {cls.__qualname__} of {cls.__module__}, allowed are classes that their "
                         "module has under this name (not those made inside a function)")


def refuse_gradient(op_name: str, **tensors) -> None:
    """NotImplementedError where autograd would record the call, or a tangent would be lost: the op has no gradients
    yet."""
    refuse_tangent(op_name, **tensors)
    if not torch.is_grad_enabled():
        return
    for name, x in tensors.items():
        if isinstance(x, Tensor) and x.requires_grad:
            raise NotImplementedError(
                f"{op_name}: {name} requires a gradient, and {op_name} has no backward yet; "
                f"call it under torch.no_grad(), or pass {name}.detach()")


def refuse_leaf(op_name: str, **tensors) -> None:
    """RuntimeError where a tensor that is to be written over is one whose gradient autograd keeps, or a view of one."""
    for name, x in tensors.items():
        base = x._base if x._is_view() else x
        if base.is_leaf and base.requires_grad:
            raise RuntimeError(f"{op_name}: {name} is a leaf that requires a gradient (or a view of one), and cannot "
                               "be written in place")


def refuse_overlap(op_name: str, **tensors) -> None:
    """ValueError where elements of a tensor that is to be written over share memory, or could: not plain to see. And
    where it has no memory at all (torch's efficient zeros)."""
    for name, x in tensors.items():
        if not torch.compiler.is_dynamo_compiling() and x._is_zerotensor():
            raise ValueError(f"{op_name}: {name}: is zeros without memory; not allowed in place: call .clone()")
        if _not_apart(name, x):
            raise ValueError(f"{op_name}: {name}: is {tuple(x.shape)} with strides {x.stride()}, so that elements may "
                             "share memory; not allowed in place: pass a tensor whose rows lie apart")


def made_in_inference(x) -> bool:
    """Would `refuse_inference` refuse it? Such a call is not replayed: it goes the usual way, and is refused."""
    return isinstance(x, torch.Tensor) and x.is_inference() and not torch.is_inference_mode_enabled()


def refuse_inference(op_name: str, **tensors) -> None:
    """RuntimeError, as torch's, where a tensor that is to be written over was made under torch.inference_mode and this
    is outside of it: asked before a launch, as its version is unknown after one."""
    for name, x in tensors.items():
        if x.is_inference() and not torch.is_inference_mode_enabled():
            raise RuntimeError(f"{op_name}: {name}: was made under torch.inference_mode; not allowed in place outside "
                               "of it: clone it")


def _not_apart(name, x):
    try:
        return not x.is_contiguous() and x.numel() > 0 and meets_itself(x.shape, x.stride())
    except RuntimeError:  # of what has no strides
        _dense(name, x)
        raise


def meets_itself(shape, strides) -> bool:
    """Do elements share memory? Yes, where that is not plain to see: where a step in one dimension stays inside of what
    the dimensions with smaller steps span."""
    span = 1
    for step, n in sorted((step, n) for step, n in zip(strides, shape, strict=True) if n > 1):
        if step < span:
            return True
        span += (n - 1) * step
    return False


def refuse_view(op_name: str, **tensors) -> None:
    """RuntimeError where autograd forbids that a tensor whose call it records is written over: it says so itself, but
    only when that has been done."""
    for name, x in tensors.items():
        if x._is_view() and _creation is not None and _creation(x) != torch._C._autograd.CreationMeta.DEFAULT:
            raise RuntimeError(
                f"{op_name}: {name} is one of several views that a function returned (split, chunk, unbind), or a view "
                "made where nothing was recorded; autograd does not allow that it is written in place: take a slice")


def as_parameters(name: str, x: Tensor, weight: Tensor) -> None:
    """TypeError where a layer's input has another type than its parameters, and autocast is off."""
    if x.dtype != weight.dtype and not under_autocast(x.device.type):
        raise TypeError(f"{name}: dtype is {x.dtype}, parameters are {weight.dtype}; expected the same, or "
                        "torch.autocast")


def under_autocast(kind: str) -> bool:
    """Is autocast on for a kind of device? torch raises for those that have none ("meta"); before 2.5 it cannot say
    which have."""
    if kind not in ("cuda", "cpu"):
        available = getattr(torch.amp, "is_autocast_available", None)
        if available is None or not available(kind):
            return False
    return torch.is_autocast_enabled(kind)
