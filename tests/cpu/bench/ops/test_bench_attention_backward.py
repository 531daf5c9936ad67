"""The benchmark of attention's backward, as far as it goes without a GPU."""
import pytest
import torch

from bench.ops import attention_backward as bench
from bench.ops import attention_backward_gqa as grouped
from bench.ops.attention_forward import DIMS
from bench.tune import attention_backward as tune
from tkq import reference
from tkq.reference import attention_backward as reference_attention


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


def test_both_sides_of_shared_heads_have_an_error():
    new = lambda heads: torch.randn(2, 64, heads, 64)
    do, q, k, v = new(4), new(4), new(2), new(2)
    as_many = [x.repeat_interleave(2, 2) for x in (k, v)]
    forward = lambda kv: (*kv, *reference.flash_attn(q, *kv, True))
    given = do, q, *forward((k, v)), *forward(as_many)
    error = grouped.error(64, 64, True)
    for name, some in (("tkq", given[:6]), (grouped.SAME, (*given[:2], *given[6:]))):
        found = list(reference_attention.flash_attn_backward(*some, None, True))
        assert error(name, given, found) < 1e-5
        found[1] = found[1] * 2
        assert error(name, given, found) > 0.5


def test_shapes():
    found = list(bench.jobs("backward", ((1024, 64), (4096, 64), (1024, 128), (4096, 128))))
    assert len(found) == 8 and len({job.question.shape for job in found}) == 8
    first, grouped = bench.Shape(1024, 64, False), next(bench.jobs("gqa", ((1024, 64),))).peer_options["shape"]
    assert first.batch * first.length == bench.TOKENS and first.heads * first.dim == bench.WIDTH
    assert (grouped.heads, grouped.kv_heads) == (32, 8)
    full, causal = bench.Shape(1024, 128, False), bench.Shape(1024, 128, True)
    assert full.flops == 2 * causal.flops == 10 * 16 * 16 * 1024**2 * 128


def test_cases_are_read():
    cases = [tune.parsed(text) for text in tune.CASES.split(";")]
    assert cases[0] == (128, (1024, 4096, 16384), (False, True)) and all(dim in DIMS for dim, _, _ in cases)


def test_the_model_of_a_step():
    from tkq.attention.backward.config import BackwardConfig

    shared, added = tune.model(128, BackwardConfig())
    assert shared == pytest.approx((64 + 64 + 32 + 32 + 64 + 16 + 32) * 1024 / 128 / 2560)
    assert added == pytest.approx(32 * 1024 / 2560)
    assert tune.model(128, BackwardConfig(dq_reduce="bulk"))[0] == pytest.approx(shared + 64 * 1024 / 128 / 2560)
