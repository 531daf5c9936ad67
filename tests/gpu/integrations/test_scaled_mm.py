"""tkq.integrations.scaled_mm beside torch.nn.functional.scaled_mm on a GPU: the same numbers for the same arguments."""
import pytest
import torch
import torch.nn.functional as F

from tests.helpers.gemm.fp8_cases import E4M3, E5M2, blocks, exact, matrix, operands, scale
from tkq.integrations import scaled_mm

if not hasattr(F, "scaled_mm"):
    pytest.skip("this torch has no torch.nn.functional.scaled_mm", allow_module_level=True)
S = F.ScalingType
M, N, K = 384, 528, 1040
RECIPES = {"tensor": (S.TensorWise, S.TensorWise), "row": (S.RowWise, S.RowWise),
           "1x128_128x128": (S.BlockWise1x128, S.BlockWise128x128), "1x128_1x128": (S.BlockWise1x128, S.BlockWise1x128)}


def call(f, kind, args, **kw):
    a, b, sa, sb = args
    of_a, of_b = RECIPES[kind]
    return f(a, b, sa, of_a, sb, of_b, **kw)


def given(kind, m=M, n=N, k=K, **kw):
    a, b, sa, sb = operands(m, n, k, kind, device="cuda", **kw)
    return a, b, sa.reshape(sa.shape or (1,)), sb.reshape(sb.shape or (1,))


def torchs(kind, args, **kw):
    """torch's own result. Of blocks it wants scales in one order of memory, another from version to version: the first
    that it does not refuse. Skips what this torch has not."""
    a, b, sa, sb = args
    orders = [(sa, sb)]
    if "128" in kind:
        tall, down = sa.t().contiguous().t(), sb.t().contiguous().t()
        padded = F.pad(sb, (0, 0, 0, -sb.shape[0] % 4)).t().contiguous().t()
        orders = [(tall, down), (tall, sb.contiguous()), (tall, padded)]
    for scales in orders:
        try:
            return call(F.scaled_mm, kind, (a, b, *scales), **kw)
        except (RuntimeError, NotImplementedError, ValueError) as problem:
            why = str(problem)[:150]
    pytest.skip(f"torch has not this one: {why}")


@pytest.mark.parametrize("kind", RECIPES)
@pytest.mark.parametrize("fast", (False, True))
def test_whole_numbers_are_exact(kind, fast):
    args = given(kind, whole=True, powers=True)
    for dtype in (torch.bfloat16, torch.float32):
        got = call(scaled_mm, kind, args, output_dtype=dtype, use_fast_accum=fast)
        assert torch.equal(got, exact(args, dtype)), dtype


@pytest.mark.parametrize("kind", RECIPES)
@pytest.mark.parametrize("fast", (False, True))
def test_beside_torch(kind, fast):
    args = given(kind, n=512, k=1024)
    bias = torch.randn(512, device="cuda").bfloat16() if kind in ("tensor", "row") else None
    got = call(scaled_mm, kind, args, bias=bias, use_fast_accum=fast)
    want = torchs(kind, args, bias=bias, use_fast_accum=fast and kind in ("tensor", "row"))
    truth = exact(args, bias=bias)
    off = [((x.double() - truth).norm() / truth.norm()).item() for x in (got, want)]
    assert got.dtype == want.dtype and got.shape == want.shape
    assert off[0] <= 2 * off[1] + 1e-3, f"ours {off[0]:.2e}, torch's {off[1]:.2e}"


def test_a_float8_result():
    args = given("tensor", whole=True)
    args = *args[:2], args[2] * 0 + 0.25, args[3] * 0 + 0.5
    got = call(scaled_mm, "tensor", args, output_dtype=E4M3)
    want = torchs("tensor", args, output_dtype=E4M3, use_fast_accum=True)
    assert got.dtype == want.dtype == E4M3
    differ = got.view(torch.uint8) != want.view(torch.uint8)
    assert differ.float().mean() < 1e-3  # ties, and how a result beyond 448 comes out


def test_mixed_types_and_lists():
    args = given("row", a=E4M3, b=E5M2, whole=True, powers=True)
    a, b, sa, sb = args
    got = scaled_mm(a, b, [sa], [S.RowWise], [sb], [S.RowWise], [F.SwizzleType.NO_SWIZZLE], [F.SwizzleType.NO_SWIZZLE],
                    contraction_dim=(1, 0))
    assert torch.equal(got, exact(args, torch.bfloat16))


def test_scales_of_a_square_a():
    """BlockWise128x128 for a and BlockWise1x128 for b, torch's third mix."""
    a, b = matrix(M, K, device="cuda", whole=True), matrix(N, K, device="cuda", seed=1, whole=True).t()
    square, sb = scale((blocks(M), blocks(K)), "cuda", 0, True), scale((blocks(K), N), "cuda", 1, True)
    got = scaled_mm(a, b, square, S.BlockWise128x128, sb, S.BlockWise1x128)
    assert torch.equal(got, exact((a, b, square.repeat_interleave(128, 0)[:M], sb), torch.bfloat16))


def test_under_compile():
    args = given("row", whole=True, powers=True)
    f = torch.compile(lambda *x: call(scaled_mm, "row", x), fullgraph=True, backend="eager")
    assert torch.equal(f(*args), exact(args, torch.bfloat16))
