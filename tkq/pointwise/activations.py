"""silu and gelu in float32 on the device, with their derivatives: x * w(x), where the weight w is a sigmoid or Phi.

Each function takes one Float32. silu costs about ten instructions and gelu about twenty-five, so that a kernel which
moves 6 bytes an element stays bound by memory. Straight-line: infinities and NaN come out as from torch, and |x| of any
size is safe, since exp2 saturates to inf or 0 and the reciprocal of inf is 0.
"""
import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32

LOG2_E = math.log2(math.e)
DENSITY = 1 / math.sqrt(2 * math.pi)  # of the normal distribution at 0
TANH_SCALE, TANH_CUBE = math.sqrt(2 / math.pi), 0.044715  # gelu(x, "tanh"): Hendrycks and Gimpel, 2016


# exp2 and the reciprocal are the hardware's approximations, good to 2^-22 and 2^-23. Tests that run the kernels on a
# CPU put others in the place of these three.
def _exp2(x):
    return cute.math.exp2(x, fastmath=True)


def _reciprocal(x):
    return cute.arch.rcp_approx(x)


def _erf(x):
    return cute.math.erf(x)


def sigmoid(x):
    """1 / (1 + exp(-x)); 0 where that is below 2^-126."""
    return _reciprocal(Float32(1.0) + _exp2(x * Float32(-LOG2_E)))


def silu(x):
    return x * sigmoid(x)


def silu_and_slope(x):
    """(silu(x), its derivative)."""
    w = sigmoid(x)
    return x * w, w * (Float32(1.0) + x * (Float32(1.0) - w))


def _phi(x):
    """The normal distribution function. 1 + erf cancels below x = -5, as in torch: what is lost is below 1e-7 |x|."""
    return Float32(0.5) + Float32(0.5) * _erf(x * Float32(math.sqrt(0.5)))


def gelu(x):
    return x * _phi(x)


def gelu_and_slope(x):
    w, bell = _phi(x), _exp2(x * Float32(-0.5 * LOG2_E) * x)
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
    e = cutlass.min(_exp2(u * Float32(-LOG2_E)), Float32(3e38))  # finite: 0 * e is 0 below
    w = _reciprocal(Float32(1.0) + e)
    return x * w, w + x * (w * (w * e)) * slope  # w * e is 1 - w, but does not cancel where w is near 1


VALUE = {"swiglu": silu, "geglu": gelu, "geglu_tanh": gelu_tanh}
VALUE_AND_SLOPE = {"swiglu": silu_and_slope, "geglu": gelu_and_slope, "geglu_tanh": gelu_tanh_and_slope}
