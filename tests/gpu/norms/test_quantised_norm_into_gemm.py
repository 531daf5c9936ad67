"""What a quantising norm writes is what fp8_gemm reads: values, scales and where they lie; the same bits every time."""
import pytest
import torch
import torch.nn.functional as F

import tkq
from tests.helpers.sanitizer.nan_fill import poisoned

N, OUT, EPS = 1024, 136, 1e-5


def weights(granularity, device="cuda"):
    """(b, scale_b) of a (OUT, N) matrix for fp8_gemm, and that matrix as float8 has it, in float64."""
    w = torch.randn(OUT, N, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    q, scale = tkq.quantize_fp8(w, "row" if granularity == "row" else "128x128")
    back = q.double() * (scale.double() if granularity == "row" else
                         scale.double().repeat_interleave(128, 0)[:OUT].repeat_interleave(128, 1)[:, :N])
    return q.to(device).t(), scale.to(device).t(), back.to(device)


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("granularity", ["row", "1x128"])
@pytest.mark.parametrize("M", [5, 300])
@pytest.mark.sampled(each_value=True)
def test_a_norm_and_a_product(kind, granularity, M):
    g = torch.Generator("cuda").manual_seed(M)
    x = torch.randn(M, N, device="cuda", generator=g).to(torch.bfloat16)
    weight = torch.randn(N, device="cuda", generator=g).to(torch.bfloat16)
    b, scale_b, matrix = weights(granularity)
    with poisoned():
        q, scale = getattr(tkq, kind + "_quant")(x, weight, eps=EPS, granularity=granularity)
        y = tkq.fp8_gemm(q, b, scale, scale_b)
    wide = scale.double().repeat_interleave(N if granularity == "row" else 128, 1)[:, :N]
    held = q.double() * wide
    product = held @ matrix.t()
    # Sums of about 14 bits over K, and one rounding to bf16.
    size = held.norm(dim=1, keepdim=True) * matrix.norm(dim=1)
    assert ((y.double() - product).abs() <= 2.0**-8 * product.abs() + 2.0**-10 * size).all()
    h = x.double()
    norm = F.layer_norm(h, (N,), eps=EPS) if kind == "layernorm" else F.rms_norm(h, (N,), eps=EPS)
    truth = (norm * weight.double()) @ matrix.t()
    assert (y.double() - truth).norm() <= 0.05 * truth.norm(), "e4m3 has 3 bits: 2 to 3 % for each number"


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("granularity", ["row", "1x128"])
def test_the_same_bits_every_time(kind, granularity):
    x = torch.randn(300, N, device="cuda").to(torch.bfloat16)
    weight = torch.randn(N, device="cuda").to(torch.bfloat16)
    first = getattr(tkq, kind + "_quant")(x, weight, eps=EPS, granularity=granularity)
    for _ in range(20):
        q, scale = getattr(tkq, kind + "_quant")(x, weight, eps=EPS, granularity=granularity)
        assert torch.equal(q.view(torch.uint8), first[0].view(torch.uint8)) and torch.equal(scale, first[1])
