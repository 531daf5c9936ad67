"""tkq.integrations.scaled_mm beside torch's own, on a CPU as far as torch has it there."""
import inspect

import pytest
import torch
import torch.nn.functional as F

from tests.helpers.gemm.fp8_cases import E4M3, E5M2, exact, operands
from tkq.integrations import scaled_mm

if not hasattr(F, "scaled_mm"):
    pytest.skip("this torch has no torch.nn.functional.scaled_mm", allow_module_level=True)
S = F.ScalingType
M, N, K = 32, 144, 272


def test_the_signature_is_torchs():
    ours, theirs = (inspect.signature(f).parameters for f in (scaled_mm, F.scaled_mm))
    ours, theirs = ([(p.name, p.default, p.kind) for p in found.values()] for found in (ours, theirs))
    assert ours == theirs


@pytest.mark.parametrize("kind, recipe", (("tensor", S.TensorWise), ("row", S.RowWise)))
@pytest.mark.parametrize("output_dtype", (torch.bfloat16, torch.float32, None))
@pytest.mark.parametrize("listed", (False, True))
def test_means_what_torchs_does(kind, recipe, output_dtype, listed):
    a, b, sa, sb = operands(M, N, K, kind)
    if output_dtype is None:
        sa = sa * 0.1
    sa, sb = sa.reshape(sa.shape or (1,)), sb.reshape(sb.shape or (1,))
    scales = ([sa], [recipe], [sb], [recipe]) if listed else (sa, recipe, sb, recipe)
    got = scaled_mm(a, b, *scales, output_dtype=output_dtype)
    try:
        want = F.scaled_mm(a, b, *scales, output_dtype=output_dtype)
    except (RuntimeError, NotImplementedError, ValueError):
        pytest.skip("torch has not this one on a CPU")
    assert got.dtype == want.dtype
    rtol = {torch.float32: 1e-4, torch.bfloat16: 8e-3, E4M3: 0.13}[got.dtype]
    torch.testing.assert_close(got.float(), want.float(), rtol=rtol, atol=1e-3)


def test_blocks():
    args = a, b, sa, sb = operands(M, N, K, "1x128_128x128", whole=True, powers=True)
    want = exact(args).bfloat16()
    assert torch.equal(scaled_mm(a, b, sa, S.BlockWise1x128, sb, S.BlockWise128x128), want)
    padded = torch.nn.functional.pad(sb, (0, 0, 0, 1))  # ceil(K / 128) to a multiple of 4
    assert torch.equal(scaled_mm(a, b, sa, S.BlockWise1x128, padded, S.BlockWise128x128), want)
    args = a, b, sa, sb = operands(M, N, K, "1x128_1x128", whole=True, powers=True)
    assert torch.equal(scaled_mm(a, b, sa, S.BlockWise1x128, sb, S.BlockWise1x128), exact(args).bfloat16())
    square = torch.tensor([[0.5, 2.0, 4.0]])
    got = scaled_mm(a, b, square, S.BlockWise128x128, sb, S.BlockWise1x128)
    assert torch.equal(got, exact((a, b, square.expand(M, 3), sb)).bfloat16())


@pytest.mark.parametrize("change", (dict(swizzle_a=[]), dict(swizzle_b=[]), dict(contraction_dim=(-1, 0)),
                                    dict(contraction_dim=[1, -2])))
def test_other_words_for_what_is_supported(change):
    a, b, sa, sb = operands(M, N, K, whole=True, powers=True)
    scales = sa.reshape(1), S.TensorWise, sb.reshape(1), S.TensorWise
    assert torch.equal(scaled_mm(a, b, *scales, **change), scaled_mm(a, b, *scales))
    a, b, sa, sb = (x.to("meta") for x in (a, b, scales[0], scales[2]))  # torch 2.11 has it on no CPU
    assert F.scaled_mm(a, b, sa, S.TensorWise, sb, S.TensorWise, **change).shape == (M, N)


A, B = operands(M, N, K)[:2]
BAD = (
    (dict(output_dtype=E5M2), NotImplementedError, ("output_dtype: got torch.float8_e5m2", "torch.bfloat16")),
    (dict(mat_a=A.float().to(E5M2), output_dtype=None), NotImplementedError, ("output_dtype", "mat_a's", "e5m2")),
    (dict(output_dtype=torch.float64), NotImplementedError, ("output_dtype: got torch.float64",)),
    (dict(output_dtype="bf16"), TypeError, ("output_dtype", "'bf16'", "torch.dtype")),
    (dict(mat_a=A.bfloat16()), TypeError, ("mat_a: dtype is torch.bfloat16", "e4m3")),
    (dict(mat_b=B.float()), TypeError, ("mat_b: dtype is torch.float32", "e5m2")),
    (dict(mat_a=A.t().contiguous().t()), ValueError, ("mat_a: (M, K)", "row-major", "mat_a.contiguous()")),
    (dict(mat_b=B.contiguous()), ValueError, ("mat_b: (K, N)", "column-major", "mat_b.t().contiguous().t()")),
    (dict(mat_b=B.t()), ValueError, ("scaled_mm: mat_a is (32, 272), mat_b is (144, 272)", "pass mat_b.t()")),
    (dict(mat_a=A[:, :24], mat_b=B[:24]), ValueError, ("scaled_mm: mat_a is (32, 24)", "mat_b", "K is 24")),
    (dict(mat_a=torch.zeros(M * K + 8, dtype=torch.uint8)[8:].view(E4M3).view(M, K)), ValueError,
     ("mat_a: begins at an address",)),
    (dict(mat_b=B.to("meta")), ValueError, ("mat_b: is on meta, but mat_a is on cpu",)),
    (dict(contraction_dim=("a", "b")), TypeError, ("contraction_dim: got ('a', 'b')", "ints")),
    (dict(contraction_dim=(1.0, 0.0)), TypeError, ("contraction_dim", "(1.0, 0.0)", "ints")),
    (dict(contraction_dim=(3, 2)), NotImplementedError, ("contraction_dim", "(3, 2)")),
    (dict(use_fast_accum=None), TypeError, ("use_fast_accum", "None")),
    (dict(scale_recipe_b=S.RowWise), NotImplementedError, ("TensorWise and RowWise",)),
    (dict(scale_recipe_a=S.BlockWise128x128, scale_recipe_b=S.BlockWise128x128), NotImplementedError, ("BlockWise",)),
    (dict(swizzle_a=F.SwizzleType.SWIZZLE_32_4_4), NotImplementedError, ("swizzle_a",)),
    (dict(contraction_dim=(0, 1)), NotImplementedError, ("contraction_dim",)),
    (dict(contraction_dim=None), NotImplementedError, ("contraction_dim", "None")),
    (dict(scale_recipe_a="TensorWise"), TypeError, ("scale_recipe_a", "'TensorWise'", "ScalingType")),
    (dict(swizzle_b=3), TypeError, ("swizzle_b", "3", "SwizzleType")),
    (dict(scale_a=torch.ones(3)), ValueError, ("scale_a", "(3,)", "(1, 1)")),
    (dict(scale_a=[torch.ones(1)] * 2), NotImplementedError, ("scale_a", "2 of them")),
    (dict(scale_b=None), TypeError, ("scale_b", "NoneType")),
    (dict(mat_a=3), TypeError, ("mat_a", "int")),
    (dict(mat_b=torch.ones(K).to(E4M3)), ValueError, ("mat_b", "1 dimensions")),
    (dict(scale_recipe_a=S.BlockWise1x128, scale_recipe_b=S.BlockWise1x128, scale_a=torch.ones(M, 3),
          scale_b=torch.ones(N)), ValueError, ("scale_b", f"({N},)")),
)


@pytest.mark.parametrize("change, error, words", BAD)
def test_what_is_not_supported_is_named(change, error, words):
    a, b, sa, sb = operands(M, N, K)
    args = dict(mat_a=a, mat_b=b, scale_a=sa, scale_recipe_a=S.TensorWise, scale_b=sb, scale_recipe_b=S.TensorWise)
    with pytest.raises(error) as caught:
        scaled_mm(**{**args, **change})
    assert all(w in str(caught.value) for w in words), str(caught.value)
