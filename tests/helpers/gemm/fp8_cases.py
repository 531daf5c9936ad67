"""Inputs of the float8 tests: operands with scales of every granularity, and their exact products."""
import torch

from tkq.granularity import PRODUCTS
from tkq.reference.fp8 import GROUP, fp8_gemm

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
KINDS = tuple(PRODUCTS)


def blocks(n):
    return -(-n // GROUP)


def scale_shapes(kind, m, n, k):
    return {"tensor": ((), ()), "row": ((m, 1), (1, n)), "1x128_128x128": ((m, blocks(k)), (blocks(k), blocks(n))),
            "1x128_1x128": ((m, blocks(k)), (blocks(k), n))}[kind]


def matrix(rows, cols, dtype=E4M3, device="cpu", seed=0, whole=False, overlap_epilogue=1.0):
    """(rows, cols) float8: normal numbers, or small whole ones, whose sums are exact even on tensor cores."""
    g = torch.Generator(device).manual_seed(seed + 31 * rows + cols)
    if whole:
        return torch.randint(-3, 4, (rows, cols), device=device, generator=g).float().to(dtype)
    return (torch.randn(rows, cols, device=device, generator=g) * overlap_epilogue).to(dtype)


def scale(shape, device="cpu", seed=0, powers=False, ratio=2):
    """float32 scales; powers of two (2 ** -ratio to 2 ** ratio), or positive numbers around 1."""
    g = torch.Generator(device).manual_seed(seed + 7)
    if powers:
        return torch.exp2(torch.randint(-ratio, ratio + 1, shape, device=device, generator=g).float())
    return torch.rand(shape, device=device, generator=g) + 0.5


def operands(m, n, k, kind="tensor", a=E4M3, b=E4M3, device="cpu", seed=0, whole=False, powers=False):
    """(a, b, scale_a, scale_b), b column-major."""
    to_a, to_b = scale_shapes(kind, m, n, k)
    return (matrix(m, k, a, device, seed, whole), matrix(n, k, b, device, seed + 1, whole).t(),
            scale(to_a, device, seed, powers), scale(to_b, device, seed + 1, powers))


def exact(args, out_dtype=torch.float64, **kw):
    """In float64, rounded to out_dtype."""
    return fp8_gemm(*args, out_dtype=out_dtype, wide=torch.float64, **kw)
