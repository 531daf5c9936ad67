"""Alternative activations, for bench/tune/gemm.py to time against tkq's: each takes and returns one fp32 number.

What they cost beside tkq's, in instructions an element and of these the special function unit's, is in each docstring.
"""
from cutlass import Float32, cute
from cutlass.cutlass_dsl import T, dsl_user_op

from tkq.tile.assembly import ptx

MEANS = {"gelu_odds": "gelu", "silu_of_one": "silu",
         "gelu_series": "gelu", "gelu_by_tanh": "gelu", "silu_by_tanh": "silu", "gelu_abramowitz": "gelu"}
# Phi(x) - 1/2 on |x| < 4 is x times this, of x^2; beyond, the sum saturates
_SERIES = (0.39789981758, -0.064596720771, 8.7834045584e-3, -8.1633812766e-4, 4.8199769176e-5, -1.6111003863e-6,
           2.3029265538e-8)


@dsl_user_op
def _saturated(a, b, c, *, loc=None, ip=None):
    """a b + c, inside 0 .. 1."""
    return Float32(ptx([Float32(a), Float32(b), Float32(c)], "fma.rn.ftz.sat.f32 $0, $1, $2, $3;", "=f,f,f,f", loc, ip,
                       T.f32(), pure=True))


def gelu_series(x):
    """9, none special; to within 1.8e-4 (tkq's: 10, one)."""
    square, sum = x * x, Float32(_SERIES[-1])
    for factor in reversed(_SERIES[:-1]):
        sum = sum * square + Float32(factor)
    return x * _saturated(x, sum, Float32(0.5))


# The logarithm of Phi(x) / Phi(-x) is x times a polynomial in its square, for |x| < 5.5
_ODDS = (2.2985373947, 0.1089704355, -1.3822070611e-3, 1.2007668e-5)


def gelu_odds(x):
    """9, two special: a sigmoid of a polynomial, to within 2e-3 of itself from -3 on."""
    square, sum = x * x, Float32(_ODDS[-1])
    for factor in reversed(_ODDS[:-1]):
        sum = sum * square + Float32(factor)
    return x * cute.arch.rcp_approx(Float32(1.0) + cute.math.exp2(-x * sum, fastmath=True))


def gelu_by_tanh(x):
    """6, one special: tanh of a cubic, to within 7e-4 and 2.5e-4 |x|."""
    half, square = x * Float32(0.5), x * x
    t = cute.math.tanh(x * (square * Float32(0.0356774081) + Float32(0.7978845608)), fastmath=True)
    return half * t + half


def silu_by_tanh(x):
    """3, one special, to within 2.5e-4 |x| (tkq's: 5, two)."""
    half = x * Float32(0.5)
    return half * cute.math.tanh(half, fastmath=True) + half


_RECIPROCAL = (0.999702685, -0.984835373, 0.86589466, -0.53285864, 0.152245325)  # 1 / (1 + e) for e in 0 .. 1


def silu_of_one(x):
    """11, one special: max(x, 0) - |x| e / (1 + e) with e = exp(-|x|), to within 3e-4 of itself (tkq's: 5, two)."""
    size = cute.arch.fmax(-x, cute.arch.fmin(x, Float32(3.4e38)), nan=True)
    small = cute.math.exp2(size * Float32(-1.4426950408889634), fastmath=True)
    sum = Float32(_RECIPROCAL[-1])
    for factor in reversed(_RECIPROCAL[:-1]):
        sum = sum * small + Float32(factor)
    return cute.arch.fmax(x, Float32(0.0)) - size * small * sum


def gelu_abramowitz(x):
    """15, two special, to within 1e-7 |x|: tkq's for fp16 and fp32."""
    from tkq.gemm.epilogue.registers import gelu

    return gelu(x)
