"""What a user's function does to scalars, written down as text while a tracer looks on: torch.compile and its like can
hand no Python function to an op, but text, tensors and numbers. ``replay`` reads it."""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

OP = "flex_attention"
DTYPES = {"score": torch.float32}  # others are int32
LOOKS = ("a function looks at the value of a tensor, supported are operations on tensors: torch.where in the place of "
         "if, & of and, | of or")
UNSEEN = ("an operation that torch.compile does not show, as abs(x) of Python's; supported are those of PyTorch: "
          "x.abs() or torch.abs(x)")
_NUMBERS = int, float, torch.SymInt, torch.SymFloat
_WORDS = (*_NUMBERS, bool, str, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format)


class Recorded(NamedTuple):
    """text: a line for each operation, see ``replay``. tensors, numbers: captured ones, t0, n0 and so on in it. Numbers
    are integers that the tracer has no value for; such floats are tensors, and others are in the text."""

    text: str
    tensors: list
    numbers: list


def record(function, arguments: tuple, device, op: str = OP) -> Recorded:
    """By calling the function once, on the meta device. torch.compile looks into this, and by that sees all that the
    function reads: it guards what it closes over, and the tensors are the program's own, which may be results of it and
    have gradients. So nothing that changes is served stale.

    Raises:
        NotImplementedError: a function that looks at the value of a tensor.
        ValueError: a captured tensor on another device than ``device``; of no dimension it may be on the CPU.
    """
    writer = _Writer()
    given = [writer.scalar(DTYPES.get(name, torch.int32)) for name in arguments]
    try:
        with writer:
            result = function(*given)
    except RuntimeError as problem:
        if "meta tensors" not in str(problem):
            raise
        raise NotImplementedError(f"{op}: {LOOKS}") from problem
    text = "\n".join([*writer.lines, f"result = {writer.text(result)}"])
    return Recorded(text, [_placed(x, device, op) for x in writer.tensors], writer.numbers)


def _placed(x, device, op):
    if x.device == device:
        return x
    if x.dim() == 0 and x.device.type == "cpu":
        return x.to(device)
    if x.dim() == 0 and x.is_meta:
        raise NotImplementedError(f"{op}: {UNSEEN}")
    raise ValueError(f"{op}: a captured tensor {tuple(x.shape)} is on {x.device}, expected {device}")


def _is_known(x):
    from torch.fx.experimental.symbolic_shapes import has_static_value  # which imports sympy: tracers have it

    return has_static_value(x)


class _Writer(TorchFunctionMode):
    """An operation on scalars is a line; what has none among its arguments is done as it is, its result captured."""

    def __init__(self):
        super().__init__()
        self.lines, self.tensors, self.numbers = [], [], []
        self.names = {}  # of scalars, which stand for the function's arguments and what is made of them

    def scalar(self, dtype, shape=()):
        made = torch.empty(shape, dtype=dtype, device="meta")
        self.names[made] = f"v{len(self.names)}"
        return made

    def is_scalar(self, x):
        return isinstance(x, Tensor) and x in self.names

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = {} if kwargs is None else kwargs
        every = [*args, *kwargs.values()]
        for x in (*args, *kwargs.values()):
            if isinstance(x, (tuple, list)):
                every = [*every, *x]
        tensors = [x for x in every if isinstance(x, Tensor)]
        getitem = func.__name__ in ("__getitem__", "getitem")  # Dynamo's names vary
        element = getitem and any(x.dim() == 0 for x in tensors[1:])
        if tensors and not element and not any(x in self.names for x in tensors):
            return func(*args, **kwargs)
        found = self.element(*args) if getitem else func(
            *[self.standing_in(x) for x in args], **{key: self.standing_in(x) for key, x in kwargs.items()})
        if not isinstance(found, Tensor):
            return found
        name = "Tensor.where" if func is Tensor.where else func.__name__
        words = [*[self.text(x) for x in args],
                 *[f"{key}={self.text(x)}" for key, x in kwargs.items() if key != "device"]]
        made = self.scalar(found.dtype, found.shape)
        self.lines.append(f"{self.names[made]} = {name}({', '.join(words)})")
        return made

    def standing_in(self, x):
        """Captured tensors by their type alone."""
        if isinstance(x, Tensor) and x not in self.names:
            return torch.empty(x.shape, dtype=x.dtype, device="meta")
        return x

    def element(self, x, index):
        """What is left of a tensor behind indices."""
        index = index if isinstance(index, tuple) else (index,)
        gone = len([i for i in index if not isinstance(i, slice)])
        kept = [n for n, i in zip(x.shape, index) if isinstance(i, slice)]
        return torch.empty([*kept, *x.shape[gone + len(kept):]], dtype=x.dtype, device="meta")

    def text(self, x):
        if isinstance(x, Tensor):
            return self.names[x] if x in self.names else self.captured(x)
        if isinstance(x, (tuple, list)):
            return "(" + "".join([f"{self.text(y)}, " for y in x]) + ")"
        if isinstance(x, slice):
            return f"slice({self.text(x.start)}, {self.text(x.stop)}, {self.text(x.step)})"
        if type(x) not in _WORDS:  # of NumPy, which are tensors for torch.compile
            x = torch.as_tensor(x)
            return self.captured(x.float() if x.dtype is torch.float64 else x)
        unknown = isinstance(x, _NUMBERS) and not isinstance(x, bool) and not _is_known(x)
        return self.number(x) if unknown else repr(x)

    def number(self, x):
        if isinstance(x, (float, torch.SymFloat)):
            return self.captured(torch.full((), x, dtype=torch.float32))
        self.numbers.append(x)
        return f"n{len(self.numbers) - 1}"

    def captured(self, x):
        for i, known in enumerate(self.tensors):
            if known is x:
                return f"t{i}"
        self.tensors.append(x)
        return f"t{len(self.tensors) - 1}"
