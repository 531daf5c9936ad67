"""silu and gelu in float32 on the device, with their derivatives: x * w(x), where the weight w is a sigmoid or Phi.

Each function takes one Float32 and costs two MUFU instructions (a reciprocal and an exp2) and about ten others, so that
a kernel which moves 6 bytes an element stays bound by memory. Straight-line: infinities and NaN come out as from torch,
and |x| of any size is safe, since exp2 saturates to inf or 0 and the reciprocal of inf is 0.
"""
import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32

LOG2_E = math.log2(math.e)
TANH_SCALE, TANH_CUBE = math.sqrt(2 / math.pi), 0.044715  # gelu(x, "tanh"): Hendrycks and Gimpel, 2016

# 1 - Phi(t) = exp(-t^2 / 2) * s * P(s) for t >= 0, s = 1 / (1 + TAIL_PITCH * t), P's coefficients by rising power: a
# minimax fit of the relative error over all t. In float32 the error is below 2e-7, and relative to 1 - Phi(t) below
# 6e-7 for t <= 3 and 1e-5 while the result is normal (there the rounding of t^2 is what counts), before the hardware's
# exp2 and reciprocal, which are good to 2^-22.
TAIL_PITCH = 0.33
TAIL = (0.13165093958377838, 0.13165244460105896, 0.11727709323167801, 0.08892661333084106, 0.05002975091338158,
        0.005126342177391052, 0.021235259249806404, -0.11080925166606903, 0.08577138185501099, -0.02086060866713524)
DENSITY = 1 / math.sqrt(2 * math.pi)


def _exp2(x):
    return cute.math.exp2(x, fastmath=True)


def sigmoid(x):
    """1 / (1 + exp(-x)); 0 where that is below 2^-126."""
    return cute.arch.rcp_approx(Float32(1.0) + _exp2(x * Float32(-LOG2_E)))


def silu(x):
    return x * sigmoid(x)


def silu_and_slope(x):
    """(silu(x), its derivative)."""
    w = sigmoid(x)
    return x * w, w * (Float32(1.0) + x * (Float32(1.0) - w))


def _normal(x):
    """(Phi(x), exp(-x^2 / 2)): the normal distribution."""
    t = cute.arch.fmax(x, -x, nan=True)
    bell = _exp2(t * Float32(-0.5 * LOG2_E) * t)
    s = cute.arch.rcp_approx(Float32(1.0) + t * Float32(TAIL_PITCH))
    p = Float32(TAIL[-1])
    for c in TAIL[-2::-1]:
        p = p * s + Float32(c)
    tail = bell * (p * s)
    return cutlass.select_(x < Float32(0.0), tail, Float32(1.0) - tail), bell


def gelu(x):
    return x * _normal(x)[0]


def gelu_and_slope(x):
    w, bell = _normal(x)
    return x * w, w + x * (bell * Float32(DENSITY))


def _tanh_argument(x):
    """(u, its derivative), where gelu(x, "tanh") = x * sigmoid(u): 1 + tanh(z) = 2 sigmoid(2 z)."""
    square = x * x
    u = x * (Float32(2 * TANH_SCALE) + Float32(2 * TANH_SCALE * TANH_CUBE) * square)
    return u, Float32(2 * TANH_SCALE) + Float32(6 * TANH_SCALE * TANH_CUBE) * square


def gelu_tanh(x):
    return x * sigmoid(_tanh_argument(x)[0])


def gelu_tanh_and_slope(x):
    u, slope = _tanh_argument(x)
    w = sigmoid(u)
    return x * w, w + x * (w * (Float32(1.0) - w)) * slope


VALUE = {"swiglu": silu, "geglu": gelu, "geglu_tanh": gelu_tanh}
VALUE_AND_SLOPE = {"swiglu": silu_and_slope, "geglu": gelu_and_slope, "geglu_tanh": gelu_tanh_and_slope}
