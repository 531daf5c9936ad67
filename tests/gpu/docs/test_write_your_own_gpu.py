"""The kernels of "Write your own kernel" on the GPU: right by the 2x rule, on hard data too, and as fast as it says."""
import pathlib
import sys

import pytest
import torch

import tkq
from tests.helpers.sanitizer.nan_fill import poisoned
from tkq.testing import assert_2x, timing

EXAMPLES = str(pathlib.Path(__file__).parents[3] / "examples")


@pytest.fixture(scope="module", autouse=True)
def examples():
    sys.path.append(EXAMPLES)
    yield
    sys.path.remove(EXAMPLES)


def attention(q, k, v, causal, dtype):
    """By PyTorch, in dtype."""
    q, k, v = [x.transpose(1, 2).to(dtype) for x in (q, k, v)]
    k, v = [x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v)]
    s = q @ k.transpose(2, 3) * 128**-0.5
    if causal:
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -torch.inf)
    return (s.softmax(-1) @ v).transpose(1, 2)


def of_heads(B, S, H, Hk, seed=0):
    g = torch.Generator("cuda").manual_seed(seed)
    return [torch.randn(B, S, heads, 128, device="cuda", generator=g) for heads in (H, Hk, Hk)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [
    (1, 1, 1, 1), (2, 77, 2, 2), (2, 128, 4, 2), (1, 129, 2, 1), (3, 1000, 8, 2), (1, 2048, 16, 16), (4, 640, 20, 4)],
    ids=str)
def test_flash_attention(shape, causal):
    from write_a_flash_attention import flash_attention

    q, k, v = [x.bfloat16() for x in of_heads(*shape)]
    truth, theirs = [attention(q, k, v, causal, dtype) for dtype in (torch.float64, torch.bfloat16)]
    with poisoned():
        for _ in range(3):  # the counter of tasks is back at 0 each time
            assert_2x(flash_attention(q, k, v, causal), truth, theirs, what=f"{shape}, causal {causal}")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["large scores", "small", "one huge element", "constant"])
def test_flash_attention_on_hard_data(kind, causal):
    from write_a_flash_attention import flash_attention

    q, k, v = of_heads(2, 300, 4, 2, seed=1)
    if kind == "large scores":
        q, v = q * 100, v * 1e4
    elif kind == "small":
        q, k, v = q * 1e-4, k * 1e-4, v * 1e-4
    elif kind == "one huge element":
        k[0, 17, 0, 5], v[1, 250, 1, 9] = 1e4, 1e4
    else:
        q, k, v = [torch.full_like(x, 0.75) for x in (q, k, v)]
    q, k, v = [x.bfloat16() for x in (q, k, v)]
    truth, theirs = [attention(q, k, v, causal, dtype) for dtype in (torch.float64, torch.bfloat16)]
    with poisoned():
        assert_2x(flash_attention(q, k, v, causal), truth, theirs, what=f"{kind}, causal {causal}")


def test_flash_attention_of_strided_views():
    from write_a_flash_attention import flash_attention

    x = torch.randn(2, 260, 3, 4, 128, device="cuda").bfloat16()
    q, k, v = x.unbind(2)
    truth, theirs = [attention(q, k, v, True, dtype) for dtype in (torch.float64, torch.bfloat16)]
    with poisoned():
        assert_2x(flash_attention(q, k, v, True), truth, theirs)


@pytest.mark.parametrize("scale", [1.0, 1e4, 1e-4])
@pytest.mark.parametrize("shape", [
    (1, 8, 8), (128, 256, 64), (129, 264, 72), (1000, 520, 200), (5000, 3000, 1032)], ids=str)
def test_gemm(shape, scale):
    from write_a_gemm import gemm

    M, N, K = shape
    a, b = [(torch.randn(rows, K, device="cuda") * scale).bfloat16() for rows in (M, N)]
    with poisoned():
        assert_2x(gemm(a, b), a.double() @ b.double().t(), a @ b.t(), what=str(shape))


@pytest.mark.parametrize("S", [1, 64, 65, 300])
def test_based(S):
    """Also of large scores."""
    from write_a_based import based, exactly, inputs

    for size in (1.0, 20.0):
        q, k, v = inputs(2, S, 3)
        q, k = q * size, k * size
        with poisoned():
            assert_2x(based(q, k, v), exactly(q, k, v), exactly(q, k, v, torch.bfloat16), what=f"S {S}, size {size}")


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("S", [4096, 16384])
def test_flash_attention_has_85_percent_of_the_shipped_kernels_speed(S, causal):
    from write_a_flash_attention import flash_attention

    both = timing.compare(
        {"this": lambda q, k, v: flash_attention(q, k, v, causal),
         "tkq": lambda q, k, v: tkq.flash_attn(q, k, v, causal=causal)},
        lambda i: [x.bfloat16() for x in of_heads(16384 // S, S, 16, 16, seed=i)])
    assert timing.ratio(both["this"], both["tkq"]) > 0.85
