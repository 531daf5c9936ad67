"""What happens to a product before it is stored: the part of a spec that decides which code is compiled. Pure Python.

y = f(alpha * a @ b + beta * c + bias), in float32. ``epilogue.registers`` is the same on the device.
"""
from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass

ACTIVATIONS = ("relu", "silu", "gelu", "gelu_tanh")
GATES = ("swiglu", "geglu", "geglu_tanh")  # act(gate) * up: half as many columns come out as b has
GATED = {**{name: (name, "split") for name in GATES},
         **{f"{name}_interleaved": (name, "interleaved") for name in GATES}}
VECTOR_DTYPES = ("bf16", "fp16", "fp32")


@dataclass(frozen=True)
class Epilogue:
    """activation: one of ACTIVATIONS or GATED, "module:function" of the user's own, or "" for none.
    bias: its dtype, or "" for none; a value for each column of b. residual: whether there is a c, of the result's type.
    residual_pairs: c's rows begin at even elements and are of an even length, so that it is read two at a time.
    alpha, beta: whether there is one to multiply by; their values come with each call.
    located: the user's function takes (x, row, column) of the result, and not x alone.

    Raises:
        NotImplementedError: a value that no kernel takes, by name.
    """

    activation: str = ""
    bias: str = ""
    residual: bool = False
    residual_pairs: bool = False
    alpha: bool = False
    beta: bool = False
    located: bool = False

    def __post_init__(self):
        if self.bias not in ("", *VECTOR_DTYPES):
            raise NotImplementedError(f"gemm: bias is {self.bias!r}, supported are {', '.join(VECTOR_DTYPES)}")
        if self.activation and ":" not in self.activation and self.activation not in (*ACTIVATIONS, *GATED):
            raise NotImplementedError(f"gemm: activation is {self.activation!r}, supported are "
                                      f"{', '.join((*ACTIVATIONS, *GATED))} and functions of a module")
        if self.gate and self.residual:
            raise NotImplementedError(f"gemm: activation is {self.activation!r} and there is a c: of a gated "
                                      "activation only alpha and bias are supported")

    @property
    def gate(self) -> str:
        """Empty, or how a gated activation's columns lie in b: "split" (gate | up) or "interleaved" (g u g u ..)."""
        return GATED[self.activation][1] if self.activation in GATED else ""

    @property
    def plain(self) -> bool:
        """Is there nothing to do but to round?"""
        return self == PLAIN

    @property
    def curved(self) -> bool:
        """Is there an activation that is worth hiding under the next tile's products?"""
        return self.activation not in ("", "relu") and not (self.located or self.residual)


PLAIN = Epilogue()
_ALLOWED = f"{', '.join((*ACTIVATIONS, *GATED))}, and functions that a module has under their own name"


def name_of(activation) -> str:
    """The spec's name of what a caller passes: None, a name, or a function that a module has under its own name.

    Raises:
        ValueError: another name, a function that its module does not have (a lambda, or one made inside another).
        TypeError: anything else.
    """
    if activation is None:
        return ""
    if isinstance(activation, str):
        if activation not in (*ACTIVATIONS, *GATED):
            own(activation)
        return activation
    if not inspect.isfunction(activation):
        raise TypeError(f"gemm: activation is {type(activation).__name__}, allowed are {_ALLOWED}")
    name = f"{activation.__module__}:{activation.__qualname__}"
    if own(name) is not activation:
        raise ValueError(f"gemm: activation is {activation.__qualname__} of {activation.__module__}, allowed are "
                         "functions that their module has under this name")
    return name


def own(name: str) -> Callable:
    """The user's function of a name "module:function".

    Raises:
        ValueError: there is none."""
    module, colon, function = name.partition(":")
    if not (colon and function.isidentifier()):
        raise ValueError(f"gemm: activation is {name!r}, allowed are {_ALLOWED}")
    if module.partition(".")[0] == "torch":
        raise ValueError(f"gemm: activation is {name!r}, which computes with tensors; allowed are functions of numbers "
                         f"of the DSL, and, by their words, {', '.join(map(repr, (*ACTIVATIONS, *GATED)))}")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as problem:
        raise ValueError(f"gemm: activation is {name!r}, which cannot be imported: {problem}") from None
    if not (inspect.isfunction(found) and _takes_numbers(found)):
        raise ValueError(f"gemm: activation is {name!r}, {found!r}; allowed are functions, written in Python, of one "
                         "number or of (number, row, column)")
    return found


def _takes_numbers(function) -> bool:
    parameters = inspect.signature(function)
    if len(parameters.parameters) == 3:
        return True
    try:
        parameters.bind(0.0)
    except TypeError:
        return False
    return True


@functools.lru_cache(256)
def is_located(name: str) -> bool:
    """Does the activation of this name take (x, row, column)?"""
    return ":" in name and len(inspect.signature(own(name)).parameters) == 3


def sources(epilogue: Epilogue) -> tuple:
    """Modules outside tkq whose code is in the kernel, for ``Recipe``."""
    return (epilogue.activation.partition(":")[0],) if ":" in epilogue.activation else ()
