"""From a subclass of ReductionBase and torch tensors to a launch: compile once, cache on disk, call.

The class is called as Class(dtype, N, **options), its `__call__` with the tensors, scalars and Nones as given, and with
torch's current stream where its signature has it: the parameter named stream, or annotated CUstream, behind the others
or between them.
"""
from .. import runtime
from ..runtime.call import check, dtypes
from ..runtime.device import arch
from . import geometry, signature
from .spec import Argument, ReductionSpec

_launchers: dict = {}  # (class, options, what the arguments look like) -> compiled function


def launch(cls, args, options):
    """Call the kernel of `cls` on `args`, on torch's current stream.

    Args:
        args: what `__call__` of the class takes, without the stream: tensors (M, N), (N,) or (M,), floats, ints, None,
            each of a kind that the annotation of its parameter allows; an int is a float where that says Float32.
            The first one is the (M, N) tensor that gives dtype and N.
        options: keyword arguments of the constructor; hashable values with a repr that says all.

    Raises:
        TypeError, ValueError: a class made inside a function; an argument that is none of these, a row without
            elements, a tensor not on the GPU, a last dimension that is not
            contiguous, a base address or row stride that an access of `cls.copy_bits` bits cannot take.
        NotImplementedError: an argument requires a gradient, which autograd would lose: launch inside an
            autograd.Function, where gradients are off.
    """
    check.refuse_gradient(f"{cls.__name__}.launch", **{f"argument {i}": a for i, a in enumerate(args)})
    arguments = _describe(cls, args)
    key = cls, args[0].shape[1], arguments, tuple((name, type(value), value) for name, value in sorted(options.items()))
    try:
        run = _launchers.get(key)
    except TypeError:  # of what has no hash
        recipe(cls, args, options)
        raise
    if run is None:
        made = recipe(cls, args, options)
        _check_devices(cls, args)
        arch.require_hopper(args[0].device)
        run = _launchers[key] = _with_floats(runtime.function(made), arguments, made.args[0].arguments)
    if args[0].shape[0]:
        run(*args)


def _check_devices(cls, args):
    for i, a in enumerate(args):
        if hasattr(a, "is_cuda") and not a.is_cuda:
            raise ValueError(f"{cls.__name__}.launch: argument {i}: is on {a.device}, allowed are CUDA tensors")


def _with_floats(run, arguments, fitted):
    """run, of arguments of which some ints are to be floats."""
    if arguments == fitted:
        return run
    as_floats = [a.kind != f.kind for a, f in zip(arguments, fitted, strict=True)]

    def converted(*args):
        run(*(float(a) if is_float else a for a, is_float in zip(args, as_floats, strict=True)))
    return converted


def recipe(cls, args, options):
    """What `launch` has to compile; no GPU is needed, and the tensors may be on any device."""
    check.importable(cls)
    arguments = signature.fitted(cls, args, _describe(cls, args))
    M, N = args[0].shape
    if N == 0:
        raise ValueError(f"{cls.__name__}: argument 0: got shape ({M}, 0), allowed are rows of one element and more")
    _check_copy_bits(cls, args[0])
    _check_accesses(cls, args, arguments)
    for name, value in options.items():
        _check_option(f"{cls.__name__}: {name}", value)
    spec = ReductionSpec(cls.__module__, cls.__qualname__, N, arguments, tuple(sorted(options.items())))
    return runtime.Recipe("tkq.reduction.build:build", (spec,), sources=(cls.__module__,))


def _check_option(name, value):
    try:
        hash(value)
    except TypeError:
        raise TypeError(f"{name}: got {type(value).__name__}, allowed are values that can be hashed") from None


def _check_copy_bits(cls, x):
    allowed = [bits for bits in (8, 16, 32, 64, 128) if bits >= 8 * x.element_size()]
    if type(cls.copy_bits) is not int or cls.copy_bits not in allowed:
        raise ValueError(f"{cls.__name__}.copy_bits: got {cls.copy_bits!r}, allowed for rows of {x.dtype} are "
                         f"{', '.join(map(str, allowed))}")


def _check_accesses(cls, args, arguments):
    """An access has one element at least."""
    for i, (a, argument) in enumerate(zip(args, arguments, strict=True)):
        if argument.kind in ("matrix", "columns") and 8 * a.element_size() > cls.copy_bits:
            raise ValueError(f"{cls.__name__}: argument {i}: got {a.dtype}, allowed are elements of {cls.copy_bits} "
                             "bits at most, by the class's copy_bits")


def _describe(cls, args) -> tuple:
    if not args or not hasattr(args[0], "data_ptr") or args[0].dim() != 2:
        _refuse_first(cls, args)
    try:
        vector = geometry.vector(args[0].shape[1], 8 * args[0].element_size(), cls.copy_bits)
        return tuple([_describe_one(f"{cls.__name__}: argument {i}", a, args[0].shape, vector, cls.copy_bits // 8)
                      for i, a in enumerate(args)])
    except (TypeError, ZeroDivisionError):
        _check_copy_bits(cls, args[0])
        raise


def _refuse_first(cls, args):
    if not args or not hasattr(args[0], "data_ptr"):
        found = f"argument 0: got {type(args[0]).__name__}" if args else "got no arguments"
        raise TypeError(f"{cls.__name__}: {found}, the first one must be an (M, N) tensor")
    raise ValueError(f"{cls.__name__}: argument 0: got shape {tuple(args[0].shape)}, the first argument must be an "
                     "(M, N) tensor")


def _describe_one(name, a, shape, vector, most_bytes) -> Argument:
    """vector: elements of one access to the first argument; an access to another one has as many, of at most
    `most_bytes` bytes."""
    if a is None or (isinstance(a, (int, float)) and not isinstance(a, bool)):
        if isinstance(a, int) and not -1 << 31 <= a < 1 << 31:
            raise ValueError(f"{name}: got {a if abs(a) < 1 << 64 else 'more than 64 bits'}, allowed are ints of 32 "
                             "bits: from -2^31 to 2^31 - 1")
        return Argument("none" if a is None else "float" if isinstance(a, float) else "int")
    if not hasattr(a, "data_ptr"):
        raise TypeError(f"{name}: got {type(a).__name__}, allowed are tensors, float, int, None")
    check.settled(name, a)
    M, N = shape
    kind = {(M, N): "matrix", (N,): "columns"}.get(tuple(a.shape), "rows" if tuple(a.shape) == (M,) else None)
    if kind is None:
        raise ValueError(f"{name}: got shape {tuple(a.shape)}, allowed are ({M}, {N}), ({N},) and ({M},)")
    if a.shape[-1] > 1 and a.stride(-1) != 1:
        raise ValueError(f"{name}: got strides {a.stride()}, allowed is a contiguous last dimension (stride 1)")
    size = a.element_size()
    bytes_ = min(most_bytes, vector * size)
    if kind == "columns" and M == N and a.data_ptr() % bytes_:
        kind = "rows"  # either may be meant; what is read row by row may be anywhere
    if kind == "rows":
        return Argument(kind, dtypes.name_of(a.dtype))
    row = a.stride(0) * size if kind == "matrix" and M > 1 else 0
    if a.data_ptr() % bytes_ or row % bytes_:
        raise ValueError(
            f"{name}: got a base address of {a.data_ptr() % bytes_} bytes modulo {bytes_} and rows {row} bytes apart, "
            f"allowed for N = {N} are multiples of {bytes_} bytes: pass a copy, or write the kernel for narrower "
            "accesses and set its class's copy_bits")
    return Argument(kind, dtypes.name_of(a.dtype), bytes_ // size)
