"""wgmma in every form, dtype, swizzle and part: exact on small whole numbers, close on random ones."""
import pytest
import torch

from tests.helpers.tile import cases
from tests.helpers.tile.run import normal, poisoned, run, small_ints


def operands(p, make):
    a, b = make(p.a_dtype, *p.a_shape), make(p.b_dtype, *p.b_shape, seed=1)
    wide_a, wide_b = a.double(), b.double()
    wide_a = wide_a.t() if p.form.startswith("At") else wide_a
    wide_b = wide_b.t() if p.form.endswith("Bt") else wide_b
    first, end = p.span or (0, p.k)
    return a, b, wide_a[:, first:end], wide_b[first:end]


def product(p, a, b):
    d = poisoned("fp32", 64 * p.a_parts, p.n)
    run("mma:build", (p,), a, b, d)
    return d.double() / (2.0 if p.twice else 1.0)


@pytest.mark.parametrize("p", cases.PRODUCTS, ids=lambda p: cases.name("mma", (p,)))
@pytest.mark.sampled(when=lambda p: cases.PRODUCTS.index(p) % 4 in (0, 3))
def test_product(p):
    a, b, wide_a, wide_b = operands(p, small_ints)
    got = product(p, a, b)
    assert torch.equal(got, wide_a @ wide_b), f"{int((got != wide_a @ wide_b).sum())} of {got.numel()} differ"

    a, b, wide_a, wide_b = operands(p, normal)
    error = (product(p, a, b) - wide_a @ wide_b).abs()
    # The tensor core keeps fewer bits than fp32 of an 8-bit product's sum; relative to the sum of absolute products.
    limit = (2e-3 if p.a_dtype.startswith("e") else 1e-4) * (wide_a.abs() @ wide_b.abs())
    assert (error <= limit).all(), f"error up to {(error / limit).max().item():.2f} of the limit"
