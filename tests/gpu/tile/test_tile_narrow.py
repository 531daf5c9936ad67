"""Results rounded as they are made; column vectors from shared memory; blocks of several roles."""
import math

import pytest
import torch

from tests.helpers.tile import cases
from tests.helpers.tile.kernels import narrow
from tests.helpers.tile.run import DTYPES, normal, poisoned, run, same
from tkq.tile.float8 import operand_column

NARROW = {
    "product": lambda a, b, v, w, n: a * b,
    "vectors": lambda a, b, v, w, n: (a + b + v) * w,
    "number": lambda a, b, v, w, n: b * 3.0,
    "column": lambda a, b, v, w, n: torch.where(torch.arange(a.shape[1], device="cuda") < n, a, 0.0),
}


@pytest.mark.parametrize("dtype,cols", cases.NARROW)
def test_apply_narrow(dtype, cols):
    a, b = normal("fp32", 64, cols), normal(dtype, 64, cols, seed=1)
    v, w = normal("fp32", 64, seed=2), normal("fp32", cols, seed=3)
    for n in (-5, 0, 1, 13, cols - 1, cols + 9):
        out, limit = poisoned(dtype, len(NARROW), 64, cols), torch.tensor([n], dtype=torch.int32, device="cuda")
        run("narrow:build_narrow", (dtype, cols), (a, b, v, w, limit, out))
        for got, (name, f) in zip(out, NARROW.items()):
            same(got, f(a, b.float(), v[:, None], w, n).to(DTYPES[dtype]), f"{name} {n}")


@pytest.mark.parametrize("dtype", ("bf16", "fp16"))
def test_apply_triangle(dtype):
    """0 in the other half, also where what is not computed would be NaN."""
    a, v, w = normal("fp32", 64, 64), normal("fp32", 64, seed=2), normal("fp32", 64, seed=3)
    a[3, 40:], a[60, 61], a[40, 3] = math.nan, math.inf, math.nan
    out = poisoned(dtype, len(narrow.TRIANGLES), 64, 64)
    run("narrow:build_triangle", (dtype,), (a, v, w, out))
    i, j = torch.arange(64, device="cuda")[:, None], torch.arange(64, device="cuda")
    for got, how in zip(out, narrow.TRIANGLES, strict=True):
        seen = j >= i + how["apart"] if how["upper"] else j <= i - how["apart"]
        same(got, torch.where(seen, (a + v[:, None]) * w, 0.0).to(DTYPES[dtype]), str(how))


@pytest.mark.parametrize("cols, every", cases.EXPONENTIALS)
def test_exp2_polynomial(cols, every):
    """Close to 2 ** a, and so is the mean; powers of 2 of integers; NaN stays; numbers too small for a normal one."""
    a = torch.linspace(-130, 127, 64 * cols, device="cuda").view(64, cols)
    a[7], a[8, ::3], a[9], a[10] = -math.inf, math.nan, torch.arange(cols, device="cuda") - 100.0, -1e6
    out = poisoned("fp32", 64, cols)
    run("narrow:build_exp2", (cols, every), (a, out))
    exact = torch.exp2(a.double())
    small = a < -126
    assert (out[small] <= 2.0 ** -126).all() and (out[small] >= 0).all()
    assert torch.equal(out.isnan(), a.isnan())
    right = ~small & ~a.isnan()
    off = out.double()[right] / exact[right] - 1
    assert off.abs().max() < (1.3e-4 if every else 1e-6) and off.mean().abs() < 6e-5
    if every == 1:
        assert torch.equal(out[9], exact[9].float())
    elif every == 0:
        assert not out[7].any()


@pytest.mark.parametrize("cols", (32, 128))
def test_copy_e4m3(cols):
    """An accumulator as an operand, its columns in the operand's order; numbers of all sizes, NaN and infinities."""
    a = normal("fp32", 64, cols) * torch.logspace(-5, 4, cols, device="cuda")
    a[3, 5], a[8, 1], a[9, 2] = math.nan, math.inf, -math.inf
    out = poisoned("e4m3", 64, cols)
    run("narrow:build_e4m3", (cols,), (a, out))
    order = [16 * (i // 16) + operand_column(i % 16) for i in range(cols)]
    same(out, a[:, order].clamp(-448, 448).to(out.dtype), "e4m3")


@pytest.mark.parametrize("every", (1, 3))
def test_exp2_e4m3(every):
    """Within 0.55 of the last bit, and exact for powers of 2; small numbers, infinities and NaN; groups that are not
    chosen stay as they are."""
    cols, factor = 64, 0.37
    wanted = torch.linspace(-12, 8, 64 * cols, device="cuda")[torch.randperm(64 * cols, device="cuda")].view(64, cols)
    shift = normal("fp32", 64, seed=1) * 3
    wanted[0] = torch.arange(cols, device="cuda") % 20 - 11.0
    a = (wanted + shift[:, None]) / factor
    a[0] = torch.where(wanted[0] > -11, a[0], -math.inf)
    a[1, ::2], a[2] = math.nan, -1e9
    out = poisoned("e4m3", 64, cols)
    run("narrow:build_exp2_e4m3", (cols, factor, every), (a, shift, out))
    order = [16 * (i // 16) + operand_column(i % 16) for i in range(cols)]
    # the group of a row's place in the operand, by rows of a warp's sixteen
    place, row = torch.arange(cols, device="cuda") // 16, torch.arange(64, device="cuda") % 16 // 8
    chosen = (2 * place + row[:, None]) % every == 0
    got, exact = out.float().double(), torch.exp2(factor * a[:, order].double() - shift[:, None].double())
    assert (out.view(torch.uint8)[~chosen] == 0x38).all()
    exact = torch.where(exact.isnan(), 0.0, exact)
    last_bit = torch.exp2(torch.floor(torch.log2(exact.clamp(min=2.0**-6))) - 3)
    off = ((got - exact) / last_bit)[chosen & (exact >= 2.0**-6 * 1.001)]
    assert off.abs().max() < 0.55 and off.mean().abs() < 0.04
    assert ((got - exact) * 2**9)[chosen & (exact < 2.0**-6)].abs().max() < 2.5
    powers = chosen[0] & (wanted[0, order] > -6)
    assert torch.equal(got[0, powers], torch.exp2(wanted[0, order][powers]).double())
    assert not got[2][chosen[2]].any()


@pytest.mark.parametrize("roles", cases.ROLES, ids=str)
def test_roles(roles):
    threads = 128 * sum(groups for _, groups, _ in roles)
    out = poisoned("int32", 3, threads)
    run("narrow:build_roles", (roles,), out)
    expected = []
    for number, (_, groups, warps) in enumerate(roles):
        for group in range(groups):
            for warp in range(4):
                expected += [1000 * number + 100 * group + warp if warp < warps else -77] * 32
    assert out.tolist() == [expected] * 3


def test_scratch():
    x, y = normal("bf16", 128, 64), poisoned("bf16", 128, 64)
    run("narrow:build_scratch", (), x, normal("bf16", 64, 128, seed=1), y)
    same(y, x)
