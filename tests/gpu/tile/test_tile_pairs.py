"""Complex register tiles against torch's complex numbers."""
import pytest
import torch

from tests.helpers.tile.run import DTYPES, normal, poisoned, run, small_ints

RESULTS = ("product", "factors", "powers", "sum", "table", "rounded")


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
