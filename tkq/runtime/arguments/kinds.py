"""What an argument of a public function may be: the check of one value, and the words for what is wrong with it.

A number is Python's int or float, or another ``numbers.Real`` (NumPy's scalars, Fraction), which is taken by its value;
an integer is Python's int or another ``numbers.Integral``. A bool is neither, and a tensor is neither: reading one
would wait for the GPU. A flag is True or False. Numbers that torch traces (SymInt, SymFloat) pass: their op is asked
again when what was traced runs.
"""
from __future__ import annotations

import numbers
import reprlib
import sys
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor

from ... import granularity
from ..call import check, dtypes
from . import granularities

END = check.FLOAT32_END
_DEVICES = "cuda", "cpu", "meta"
EXACT = 1 << 53  # ints below it are the same as floats; from there on torch and tvm-ffi may not take them as ints
DOUBLE_END = sys.float_info.max


@dataclass(frozen=True)
class Argument:
    """kind: "tensor", "flag", "number", "integer", "dtype", "choice", "window" (a pair of limits), "limits" (a pair
    of numbers, infinities too), "device"; "function" (a choice, or the user's function) and "other", which the function
    itself checks.

    none: is None allowed? default: what stands in the signature; `REQUIRED` where nothing does.
    dtypes: of a tensor, or the values of a dtype, by their names ("bf16"). Of an integer: of a tensor in its place.
    choices: the words of a choice. scales: these are names of `tkq.granularity`, and torch's members and the old names
        are taken for them.
    low, high: the least and the largest number, both allowed; None where there is none. above: low itself is not.
    end: a number's magnitude is below this: infinite from there on in the type that it is computed in.
    written: the function writes to the tensor: "always", or the argument that asks for it.
    error: of a choice that is not among the words, or of an integer that the tensors do not allow.
    """

    name: str
    kind: str
    none: bool = False
    default: Any = None
    dtypes: tuple = ()
    choices: tuple = ()
    low: Optional[float] = None
    high: Optional[float] = None
    above: bool = False
    end: float = END
    written: str = ""
    error: type = ValueError
    scales: bool = False

    @property
    def types(self) -> tuple:
        """dtypes, as torch has them."""
        return tuple(torch.float64 if name == "float64" else dtypes.torch_type(name) for name in self.dtypes)

    @property
    def allowed(self) -> str:
        """The values that are allowed, in words: "numbers from 0 to 1"."""
        if self.kind == "flag":
            return "True and False"
        if self.kind == "choice":
            words = ", ".join(map(repr, self.choices))
            if self.scales:
                words += f", and {granularity.members(self.choices)}"
        elif self.kind in ("dtype", "tensor"):
            words = ", ".join(map(str, self.types))
        else:
            words = self._range()
        return f"{words}, and None" if self.none else words

    def _range(self):
        integers = self.kind == "integer"
        if self.low is not None and self.high is not None:
            return f"{'integers' if integers else 'numbers'} from {plain(self.low)} to {plain(self.high)}"
        words = "integers" if integers else "finite numbers"
        if self.low is not None:
            words += f" above {plain(self.low)}" if self.above else f" from {plain(self.low)} on"
        return words if integers or self.end > END else f"{words}, up to 3.4e38 as in float32"

    # ---- one value --------------------------------------------------------------------------------------------------

    def take(self, op: str, value):
        """The value as the function goes on with it: NumPy's numbers as Python's.

        Raises:
            TypeError: it is of another type.
            ValueError: it is of that type, and not allowed.
        """
        if value is None and self.none:
            return None
        return getattr(self, f"_{self.kind}")(f"{op}: {self.name}: ", value)

    def _flag(self, where, value):
        if value is not True and value is not False:
            raise TypeError(f"{where}got {came(value)}, allowed are True and False")
        return value

    def _number(self, where, value):
        if check.is_traced(value):
            return value
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise TypeError(f"{where}got {kind_of(value)}, expected a float{self._or_none()}")
        plain_int = type(value) is int and -EXACT < value < EXACT
        found = value if plain_int or type(value) is float else _float(value)
        if not -self.end < found < self.end or not self._within(found):
            raise ValueError(f"{where}got {came(value)}, allowed are {self.allowed}")
        return found

    def _integer(self, where, value):
        if isinstance(value, torch.SymInt):
            return value
        if self.dtypes and isinstance(value, Tensor):
            return self._tensor(where, value)
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            expected = "an int or a tensor" if self.dtypes else f"an int{self._or_none()}"
            raise TypeError(f"{where}got {kind_of(value)}, expected {expected}")
        if not self._within(value):
            raise ValueError(f"{where}got {came(value)}, allowed are {self.allowed}")
        return int(value)

    def _within(self, value):
        if self.low is not None and (value <= self.low if self.above else value < self.low):
            return False
        return self.high is None or value <= self.high

    def _choice(self, where, value):
        if self.scales:
            value = granularities.parse(where[:-2], value, self.choices, warn=not torch.compiler.is_dynamo_compiling())
        if not isinstance(value, str):
            raise TypeError(f"{where}got {came(value)}, allowed are {self.allowed}")
        if value not in self.choices:
            raise self.error(f"{where}got {came(value)}, allowed are {self.allowed}")
        return value

    def _dtype(self, where, value):
        if not isinstance(value, torch.dtype):
            raise TypeError(f"{where}got {came(value)}, which is no torch.dtype; allowed are {self.allowed}")
        if value not in self.types:
            raise TypeError(f"{where}got {value}, allowed are {self.allowed}")
        return value

    def _device(self, where, value):
        try:
            found = torch.device(value)
        except (TypeError, RuntimeError, ValueError) as error:
            kind = ValueError if isinstance(value, (str, int)) and not isinstance(value, bool) else TypeError
            raise kind(f"{where}got {came(value)}, allowed are devices as torch.device takes them"
                       f"{', and None' * self.none}: {str(error)[:200]}") from None
        if found.type not in _DEVICES:
            raise ValueError(f"{where}got {came(value)}, allowed are {', '.join(_DEVICES)}{', and None' * self.none}")
        count = torch.cuda.device_count() if found.type == "cuda" else 1
        if not 0 <= (found.index or 0) < count:
            raise ValueError(f"{where}got {came(value)}, and of {found.type} there are {count} here")
        return found

    def _tensor(self, where, value):
        check.tensor(where[:-2], value)
        if value.dtype not in self.types:
            names = ", ".join(f"{dtype} ({name})" for dtype, name in zip(self.types, self.dtypes))
            raise TypeError(f"{where}dtype is {value.dtype}, allowed are {names}")
        if value.itemsize == 1 and not torch.compiler.is_dynamo_compiling() and value.is_neg():
            raise TypeError(f"{where}is a view with a pending negation, which torch does not do in {value.dtype}")
        return value

    def _window(self, where, value):
        if not isinstance(value, (tuple, list)) or len(value) != 2:
            raise TypeError(f"{where}got {came(value)}, expected (left, right)")
        left, right = value
        return self._side(where, value, left), self._side(where, value, right)

    def _side(self, where, value, n):
        if n is None:
            return -1
        if (type(n) is int and self.low <= n <= self.high) or check.is_traced(n):
            return n
        if isinstance(n, bool) or not isinstance(n, numbers.Integral):
            raise TypeError(f"{where}got {came(value)}, expected (left, right) of ints and None")
        if not self._within(n):
            raise ValueError(f"{where}got {came(value)}, allowed are numbers of keys from 0 to 2^30 - 1, and None or "
                             "-1 for no limit")
        return int(n)

    def _limits(self, where, value):
        if not isinstance(value, (tuple, list)) or len(value) != 2:
            raise TypeError(f"{where}got {came(value)}, expected (low, high)")
        if any(isinstance(x, bool) or not isinstance(x, numbers.Real) for x in value):
            raise TypeError(f"{where}got {came(value)}, expected (low, high) of numbers")
        low, high = map(_float, value)
        if not low <= high or any(self.end <= abs(x) < float("inf") for x in (low, high)):
            raise ValueError(f"{where}got {came(value)}, allowed are two numbers in ascending order: infinities, and "
                             "those that are finite in float32")
        return low, high

    def _or_none(self):
        return " or None" if self.none else ""


def _float(value) -> float:
    """A number's value; infinity for what is beyond all floats, a Fraction of 10**400 for example."""
    try:
        return float(value)
    except OverflowError:
        return float("inf")


def came(value) -> str:
    """A value in an error's words: never long, and never read from a GPU."""
    if isinstance(value, Tensor):
        return f"a Tensor of shape {tuple(value.shape)}"
    if isinstance(value, int) and abs(value) < 1 << 63:  # as reprlib has it, which Dynamo of torch 2.9 does not trace
        return repr(value)
    try:
        of_parts = isinstance(value, (str, bytes, tuple, list, dict, set, int))
        return reprlib.repr(value) if of_parts else repr(value)[:80]
    except ValueError:  # of an int with too many digits for a text
        return f"a {type(value).__name__} of too many digits"


def kind_of(value) -> str:
    """A value of a wrong type in an error's words."""
    return came(value) if isinstance(value, Tensor) else type(value).__name__


def plain(x) -> str:
    """A limit in words: powers of two as such."""
    for n in (30, 31, 32, 62, 63):
        for sign, end, words in ((1, 1 << n, f"2^{n}"), (-1, 1 << n, f"-2^{n}")):
            if x == sign * end:
                return words
            if x == sign * end - 1 and sign > 0:
                return f"{words} - 1"
    return str(x)
