"""What a RowKernel's methods are given and what they return, checked while the kernel is traced."""
from types import SimpleNamespace

import cutlass.cute as cute
from cutlass import Float32


class NotThere(AttributeError):
    """A method asked e or r for a name that it does not have. asked: the name."""

    def __init__(self, message, asked):
        super().__init__(message)
        self.asked = asked


class Names(SimpleNamespace):
    """Values by name."""

    _letter = ""

    def __getattr__(self, name):
        raise NotThere(f"{self._letter} has no {name}, it has {', '.join(vars(self)) or 'nothing'}", name)


class Elements(Names):
    """e of a RowKernel's methods."""

    _letter = "e"


class Numbers(Names):
    """r of a RowKernel's methods."""

    _letter = "r"


def is_vector(value) -> bool:
    return isinstance(value, cute.TensorSSA)


def is_number(value) -> bool:
    """Python's, the DSL's, or one that only its private modules name: what can be subtracted, and is not many."""
    return hasattr(value, "__sub__") and not isinstance(value, (cute.TensorSSA, cute.Tensor, set, frozenset))


def said(value) -> str:
    """What came, for a message."""
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    if is_vector(value) or is_number(value):
        return "a vector" if is_vector(value) else "a number"
    return "None" if value is None else type(value).__name__


def call(kernel, method, *given):
    """What a method of the subclass returns."""
    try:
        return getattr(kernel, method)(*given)
    except NotThere as missing:
        tensors = (*kernel.loads, *kernel.vectors, *kernel.scalars)
        left_out = f": the call leaves it out, which self.has({missing.asked!r}) tells"
        raise AttributeError(f"{type(kernel).__name__}: {method}: {missing}"
                             f"{left_out if missing.asked in tensors and not kernel.has(missing.asked) else ''}"
                             ) from None


def call_for_dict(kernel, method, allowed, *given) -> dict:
    """The dict that a method of the subclass returns. allowed: the names that it may have, or None: any."""
    found, name = call(kernel, method, *given), f"{type(kernel).__name__}: {method}"
    if not isinstance(found, dict):
        raise TypeError(f"{name} returned {said(found)}, allowed is a dict")
    for key in found:
        if allowed is not None and key not in allowed:
            raise ValueError(f"{name} returned {key}, allowed are {', '.join(allowed) or 'no names'}")
    return found


def row_numbers(kernel, method, sums, r) -> dict:
    """What ``row`` returns."""
    found = call_for_dict(kernel, method, None, sums, r)
    for key, value in found.items():
        if not isinstance(key, str) or not (value is None or is_number(value)):
            raise TypeError(f"{type(kernel).__name__}: {method} returned {said(value)} as {key}, allowed are numbers "
                            "and, where there is none, None")
    return found


def row_vector(kernel, method, values: dict, name):
    """What a dict of ``write`` or ``down`` has for a store or a column: one value for each element of an access."""
    where = f"{type(kernel).__name__}: {method} returned"
    if name not in values:
        raise ValueError(f"{where} {', '.join(values) or 'nothing'}, and no {name}")
    found = values[name]
    if not is_vector(found):
        raise TypeError(f"{where} {said(found)} as {name}, allowed is a vector")
    if cute.size(found.shape) != kernel.plan.vector:
        raise ValueError(f"{where} a vector of {cute.size(found.shape)} values as {name}, e has {kernel.plan.vector}")
    return found


def row_result(kernel, methods, r, name):
    """What r has for a tensor of ``results``."""
    found = vars(r).get(name)
    if found is None:
        raise ValueError(f"{type(kernel).__name__}: {', '.join(methods) or 'no exchange'} returned no {name}, which is "
                         f"one of its results; r has {', '.join(vars(r)) or 'nothing'}")
    return found


def element(kernel, method, monoid, *given) -> tuple:
    """What ``partial`` returns: an element of the monoid, fp32."""
    found, where = call(kernel, method, *given), f"{type(kernel).__name__}: {method} returned"
    if not isinstance(found, (tuple, list)) or len(found) != monoid.sums:
        raise ValueError(f"{where} {said(found)}, its exchange takes a tuple of {monoid.sums}")
    if not (all(map(is_vector, found)) or all(map(is_number, found))):
        raise TypeError(f"{where} {', '.join(map(said, found))}; allowed are vectors alone and numbers alone")
    return tuple(v.to(Float32) if is_vector(v) and v.dtype is not Float32 else v for v in found)


def combined(monoid, a, b) -> tuple:
    """``combine(a, b)`` of a Monoid, as many values as its neutral element has."""
    found = monoid.combine(a, b)
    if not isinstance(found, (tuple, list)) or len(found) != monoid.sums:
        raise ValueError(f"{_named(monoid)} returned {said(found)}, allowed is a tuple of {monoid.sums}: its neutral "
                         f"element is {monoid.neutral}")
    wanted = is_vector if is_vector(a[0]) else is_number
    if not all(map(wanted, found)):
        raise TypeError(f"{_named(monoid)} returned {', '.join(map(said, found))} of {said(a[0])} each")
    return tuple(found)


def _named(monoid) -> str:
    function = monoid.combine
    return f"Monoid.combine, {getattr(function, '__module__', '')}.{getattr(function, '__qualname__', function)},"
