"""The epilogue on the device: from an accumulator, in registers, to the numbers that are stored.

A kernel calls, for a part of its accumulator (some columns of one warpgroup's 64 rows):
    linear(x, acc, ..)       x = alpha * acc + beta * c + bias
    activate(x, epilogue, (x,), place)  or, gated, (gate, up): from two such parts of different columns of b
``Place`` says where the part lies in the result.
"""
import math
import numbers
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Constexpr, Float16, Float32, Int32, Int64, const_expr

from ... import tile as tk
from ...pointwise import activations
from .spec import GATED, Epilogue, own


@dataclass(frozen=True)
class Inputs:
    """What comes with a call. bias: (N,), or (N / 2, 2) where gated. residual: (M, N); in pairs (M, N / 2) of int32 or,
    of fp32, int64."""

    bias: Any
    residual: Any
    alpha: Float32
    beta: Float32


@dataclass(frozen=True)
class Place:
    """Of a fragment's first element in the result."""

    row: Int32
    col: Int32


def linear(x, acc, epilogue: Epilogue, inputs: Inputs, bias=None, residual=None):
    """x = alpha * acc + beta * residual + bias, fp32 tiles of one size; what the epilogue does not have is left out.

    bias: a column vector, or a row vector where the result lies transposed. residual: a tile, of any type."""
    if epilogue.alpha:
        tk.mul(x, acc, inputs.alpha)
    else:
        tk.copy(x, acc)
    if epilogue.residual:
        wide = tk.rt_fl(x.cols)
        tk.copy(wide, residual)
        if epilogue.beta:
            tk.mul(wide, wide, inputs.beta)
        tk.add(x, x, wide)
    if epilogue.bias:
        (tk.add_row if isinstance(bias, tk.RowVec) else tk.add_col)(x, x, bias)


def activate(dst, epilogue: Epilogue, parts, place: Place, out, transposed=False):
    """dst = f(parts), fp32 tiles of one size: one part, or gate and up. out: the type that the result is rounded to,
    which decides how exact f has to be. transposed: rows are the result's columns."""
    if epilogue.located:
        _located(dst, _own(epilogue.activation), parts[0], place, transposed)
    elif epilogue.activation:
        tk.apply(dst, function(epilogue, out), *parts)
    elif dst is not parts[0]:
        tk.copy(dst, parts[0])


def activate_narrow(dst, epilogue: Epilogue, parts):
    """The same from and to tiles of 16 bits, two numbers at a time: few registers. Not for a located function."""
    tk.apply_narrow(dst, function(epilogue, dst.dtype), *parts)


def function(epilogue: Epilogue, out):
    """The activation, of one fp32 number or, gated, of two, for a result of type ``out``."""
    name = epilogue.activation
    if name in GATED:
        act = activation(_UNGATED[GATED[name][0]], out)
        return lambda gate, up: act(gate) * up
    return _own(name) if ":" in name else activation(name, out)


def _own(name: str):
    """The user's function, and a look at what it gives."""
    function = own(name)

    def number(*given):
        found = function(*given)
        if not (isinstance(found, numbers.Real) or hasattr(found, "ir_value")):  # as the DSL's numbers have
            raise TypeError(f"gemm: activation: {name} gave {found!r}, a {type(found).__name__}; allowed is a number")
        return found

    return number


def activation(name: str, out):
    """One of ACTIVATIONS, as exact as a result of type ``out`` shows."""
    few_bits = out.width <= 16 and out is not Float16
    return (_IN_8_BITS if few_bits else _ACTIVATIONS).get(name) or _ACTIVATIONS[name]


def relu(x):
    """max(x, 0); NaN stays."""
    return Float32(cutlass.select_(x < Float32(0.0), Float32(0.0), x))


_ERF = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)  # Abramowitz and Stegun, 7.1.26


def gelu(x):
    """x Phi(x), to within 3e-7 |x|: for fp16 and fp32, in fifteen instructions where the erf of fp32 takes thirty.

    Phi(-|x|) is exp(-x^2 / 2) times a polynomial in t = 1 / (1 + 0.23 |x|), and gelu(x) = max(x, 0) - |x| Phi(-|x|)."""
    size = cute.arch.fmax(x, -x)
    t = cute.arch.rcp_approx(Float32(1.0) + Float32(0.3275911 * math.sqrt(0.5)) * size)
    sum = Float32(0.5 * _ERF[-1])
    for factor in reversed(_ERF[:-1]):
        sum = sum * t + Float32(0.5 * factor)
    tail = sum * t * cute.math.exp2(x * Float32(-0.5 * tk.LOG2E) * x, fastmath=True)
    finite = cute.arch.fmax(-x, cute.arch.fmin(x, Float32(16.0)))  # |x|, but inf * 0 for -inf alone, as from torch
    return cute.arch.fmax(x, Float32(0.0)) - finite * tail


# For results of 8 bits of significand, bf16 and e4m3: x Phi(x) is max(x, 0) - |x| Phi(-|x|), and Phi(-t) two to the
# power of a polynomial of t > 0; so is what gelu(x, "tanh") has in its place. To t = 18.25 they fall, to below 2^-150.
# Eight instructions, one of them special: under float8 products each costs, hidden or not, and twelve without a special
# one cost more (docs/attempts/gemm.md). Found for the least relative error beside what rounding x to bf16 makes.
_PHI = (-1.000489747, -1.142032079, -0.482058324, -0.034873661, 2.2e-3)
_PHI_TANH = (-1.0, -1.1441421418, -0.4947825913, -0.0113326541, -6.179443093e-3)


def _gelu_of(x, powers):
    """Of -inf it is 0, the limit; NaN stays."""
    size = cute.arch.fmin(cute.math.abs(x), Float32(18.25))
    sum = Float32(powers[-1])
    for factor in reversed(powers[:-1]):
        sum = sum * size + Float32(factor)
    return cute.arch.fmax(x, Float32(0.0), nan=True) - size * cute.math.exp2(sum, fastmath=True)


def gelu_in_8_bits(x):
    """x Phi(x) to 4e-4 of itself above 0, 4e-3 from -3 on, 9e-3 from -5.5 on, 1e-9 |x| below: for bf16, whose rounding
    is off by up to 4e-3."""
    return _gelu_of(x, _PHI)


def gelu_tanh_in_8_bits(x):
    """gelu_tanh to 5e-4 of itself above 0, 3e-3 from -3 on, 8e-3 from -5.5 on, 1e-10 |x| below."""
    return _gelu_of(x, _PHI_TANH)


# gelu(x, "tanh") is x times the sigmoid of x times these, of 1 and x^2
_TANH_ODDS = tuple(2 * tk.LOG2E * activations.TANH_SCALE * factor for factor in (1.0, activations.TANH_CUBE))


def gelu_tanh(x):
    """Finite x of any size is safe: the sum's last factor is positive."""
    sum = x * x * Float32(_TANH_ODDS[1]) + Float32(_TANH_ODDS[0])
    return x * cute.arch.rcp_approx(Float32(1.0) + cute.math.exp2(-x * sum, fastmath=True))


_UNGATED = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}
_ACTIVATIONS = {"relu": relu, "silu": activations.silu, "gelu": gelu, "gelu_tanh": gelu_tanh}
_IN_8_BITS = {"gelu": gelu_in_8_bits, "gelu_tanh": gelu_tanh_in_8_bits}


def _located(dst, f, x, place, transposed):
    """The user's function of the value and where it lies in the result."""
    for i in range(cute.size(dst.tensor)):
        row, col = tk.first_row() + 8 * (i // 2 % 2), tk.first_col() + 8 * (i // 4) + i % 2
        row, col = (col, row) if transposed else (row, col)
        dst.tensor[i] = Float32(f(x.tensor[i], place.row + row, place.col + col))


# ---- a value a column, fetched long before it is used ------------------------------------------------


@dataclass(frozen=True)
class LaneCols:
    """Values of some columns, a multiple of 64, over the lanes of each warp: lane i has those of columns 2 i and
    2 i + 1 of each 64. So a quarter of what a ``ColVec`` needs waits in registers, and a shuffle brings the rest."""

    tensor: cute.Tensor  # (2, cols / 64), of the vector's type
    cols: int


def lane_cols(cols, dtype) -> LaneCols:
    """Uninitialised."""
    return LaneCols(cute.make_rmem_tensor((2, cols // 64), dtype), cols)


def load_lane_cols(v: LaneCols, src: cute.Tensor, col0):
    """v[j] = src[col0 + j]; past the end the last one is repeated."""
    last = cute.size(src) - 1
    for k in range(v.cols // 64):
        for i in range(2):
            v.tensor[i, k] = src[cutlass.min(col0 + 64 * k + 2 * tk.lane_id() + i, last)]


def gather(dst: tk.ColVec, v: LaneCols, first):
    """dst = v's columns from ``first`` on, as fp32. Whole warps."""
    words = cute.recast_tensor(v.tensor, Int32)  # a pair of 16 bits, or one of the two
    for j in range(dst.cols // 8):
        pair = first // 2 + 4 * j
        lane, k = pair % 32 + tk.lane_id() % 4, pair // 32
        if v.tensor.element_type is Float32:
            values = [cute.arch.shuffle_sync(v.tensor[i, k], lane) for i in range(2)]
        else:
            values = _unpacked(cute.arch.shuffle_sync(words[0, k], lane), v.tensor.element_type)
        dst.tensor[2 * j], dst.tensor[2 * j + 1] = values


def _unpacked(word, dtype):
    """The two numbers of 16 bits in a word, as fp32."""
    if dtype is BFloat16:
        return (word << Int32(16)).bitcast(Float32), (word & Int32(-65536)).bitcast(Float32)
    pair = cute.make_rmem_tensor((2,), dtype)
    cute.recast_tensor(pair, Int32)[0] = word
    return Float32(pair[0]), Float32(pair[1])


# ---- c -------------------------------------------------------------------------------------------------


@cute.jit
def load_residual(dst: tk.RegTile, src: cute.Tensor, place: Place, pairs: Constexpr[bool]):
    """dst[i, j] = src[place.row + i, place.col + j], converted; nothing is done past the last column, and rows past the
    end repeat the last one. pairs: src is of pairs, see ``Inputs``, dst of their type, and place.col is even."""
    words = dst.tensor
    if const_expr(pairs):
        words = cute.recast_tensor(dst.tensor, Int64 if const_expr(dst.dtype is Float32) else Int32)
    step = 2 if const_expr(pairs) else 1  # elements to a word
    row0, col0 = place.row + tk.first_row(), (place.col + tk.first_col()) // step
    rows, left = cute.size(src, mode=[0]), cute.size(src, mode=[1]) - col0
    lines = [_line(src, cutlass.min(row0 + 8 * r, rows - 1), col0) for r in range(2)]
    for j in cutlass.range_constexpr(cute.size(words) // 2):
        e = j if const_expr(pairs) else j // 2 * 2  # of the first row, elements 0 1, 4 5, 8 9 .. are j = 0 1, 2 3 ..
        col = 4 * j if const_expr(pairs) else 4 * e + j % 2
        if col < left:
            for r in cutlass.range_constexpr(2):
                i = 2 * j + r if const_expr(pairs) else 2 * e + 2 * r + j % 2
                words[i] = words.element_type(lines[r][col])


def _line(x, row, col):
    """A row of a matrix, from a column on."""
    at = x.iterator + cute.crd2idx((row, col), x.layout)
    return cute.make_tensor(at, cute.make_layout((256,), stride=(x.stride[1],)))
