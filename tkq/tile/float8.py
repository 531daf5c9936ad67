"""Scales of float8."""
import cutlass.cute as cute
from cutlass import Float32

from ..dtypes import LARGEST

SMALLEST_SCALE = 2.0**-126  # the smallest normal float32: the scale of zeros


def scale_of(amax, out):
    """Of what is to become ``out``; NaN where amax is."""
    return nan_max(amax * (1.0 / LARGEST[out]), Float32(SMALLEST_SCALE))


def nan_max(a, b):
    """NaN where one of them is."""
    return cute.arch.fmax(a, b, nan=True)
