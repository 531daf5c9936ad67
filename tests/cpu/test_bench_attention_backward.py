"""The benchmark of attention's backward, as far as it goes without a GPU."""
import pytest
import torch

from bench import attention_backward as bench
from bench import tune_attention_backward as tune
from tkq import reference
from tkq import reference_attention_backward as reference_attention


@pytest.mark.parametrize("kv_heads", (0, 2))
@pytest.mark.parametrize("causal", (False, True))
def test_the_error_is_that_of_two_heads(kv_heads, causal):
    shape = bench.Shape(64, 64, causal, kv_heads)
    new = lambda heads: torch.randn(2, 64, heads, 64)
    q, k, v, do = new(4), new(kv_heads or 4), new(kv_heads or 4), new(4)
    o, lse = reference.flash_attn(q, k, v, causal)
    given = do, q, k, v, o, lse
    found = list(reference_attention.flash_attn_backward(*given, None, causal))
    assert bench.error(shape)("tkq", given, found) < 1e-5
    found[0][0, :, -1] *= 2
    assert bench.error(shape)("tkq", given, found) > 0.5


def test_shapes():
    found = list(bench.shapes((1024, 4096), (64, 128)))
    assert len(found) == 8 and len(set(map(str, found))) == 8
    assert found[0].batch * found[0].length == bench.TOKENS and found[0].heads * found[0].dim == bench.WIDTH
    full, causal = bench.Shape(1024, 128, False), bench.Shape(1024, 128, True)
    assert full.flops == 2 * causal.flops == 10 * 16 * 16 * 1024**2 * 128


def test_cases_are_read():
    cases = [tune.parsed(text) for text in tune.CASES.split(";")]
    assert cases[0] == (128, (1024, 4096, 16384), (False, True)) and all(dim in bench.DIMS for dim, _, _ in cases)


def test_the_model_of_a_step():
    from tkq.attention.backward_plan import BackwardConfig

    shared, added = tune.model(128, BackwardConfig())
    assert shared == pytest.approx((64 + 64 + 32 + 32 + 64 + 16 + 32) * 1024 / 128 / 2560)
    assert added == pytest.approx(32 * 1024 / 2560)
    assert tune.model(128, BackwardConfig(dq_add="bulk"))[0] == pytest.approx(shared + 64 * 1024 / 128 / 2560)


def test_without_a_gpu_it_says_so(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert bench.main([]) == 2 and "needs a GPU" in capsys.readouterr().out
