"""Complex register tiles against torch's complex numbers."""
import pytest
import torch

from tests.helpers.tile.run import DTYPES, normal, poisoned, run, small_ints

RESULTS = ("product", "factors", "powers", "sum", "table", "rounded")
SPLIT_RESULTS = ("product", "factors", "powers", "sum", "rounded")


def results(dtype, a, b, v):
    out = poisoned("fp32", len(RESULTS), 2, 64, 64)
    run("pairs:build_pairs", (dtype,), (a, b, v, out))
    return {name: torch.complex(*x.double()) for name, x in zip(RESULTS, out, strict=True)}


def wanted(a, b, v, rounded):
    i = torch.arange(64, device="cuda").double()
    a, b, b_rounded, a_rounded = (torch.complex(*x.double()) for x in (a, b, rounded(b), rounded(a)))
    return dict(product=a_rounded @ b_rounded, factors=(a * b).conj(), powers=a * torch.exp(1j * i[:, None] / 64 * i),
                sum=v.double()[:, None] * a.conj() * b, table=a * b_rounded + b_rounded * b, rounded=a.conj())


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_pairs(dtype):
    """Exact of small whole numbers, but for powers; of others within roundings, those of 16 bits where there are."""
    rounded = lambda x: x.to(DTYPES[dtype]).float()
    a, b, v = (small_ints("fp32", *shape, seed=i) for i, shape in enumerate(((2, 64, 64), (2, 64, 64), (64,))))
    got, right = results(dtype, a, b, v), wanted(a, b, v, rounded)
    for name in RESULTS:
        if name != "powers":
            assert torch.equal(got[name], right[name]), name
    a, b, v = (normal("fp32", *shape, seed=i) for i, shape in enumerate(((2, 64, 64), (2, 64, 64), (64,))))
    got, right = results(dtype, a, b, v), wanted(a, b, v, rounded)
    half = torch.finfo(DTYPES[dtype]).eps
    for name in RESULTS:
        size = half if name in ("factors", "powers", "rounded") else 2e-6
        error = (got[name] - right[name]).abs().max() / right[name].abs().max()
        assert error <= size, f"{name}: {error:.1e}"


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_split_pairs(dtype):
    """Of 22 bits in fp16, of 16 in bf16: a product without one of its terms has an error of 2^-11 or of 2^-8."""
    bits = {"bf16": 2.0**-15, "fp16": 3e-6}[dtype]
    for make, sizes in ((small_ints, 0.0), (normal, bits)):
        a, b, v = (make("fp32", *shape, seed=i) for i, shape in enumerate(((2, 64, 64), (2, 64, 64), (64,))))
        out = poisoned("fp32", len(SPLIT_RESULTS), 2, 64, 64)
        run("pairs:build_split_pairs", (dtype,), (a, b, v, out))
        right = wanted(a, b, v, lambda x: x)
        for name, x in zip(SPLIT_RESULTS, out, strict=True):
            error = (torch.complex(*x.double()) - right[name]).abs().max() / right[name].abs().max()
            assert error <= (bits if name == "powers" else sizes), f"{name}: {error:.1e}"
