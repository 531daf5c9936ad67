"""What the attention benchmarks ask, without a GPU: their work, bounds and candidates."""
import pytest

pytest.importorskip("bench")

from bench.ops import attention_forward
from bench.peers import attention
from bench.tune import attention as tune_attention
from tkq import reference
from tkq.attention.forward.spec import AttentionSpec


@pytest.mark.parametrize("n, left, right", ((50, 7, 0), (50, 3, 9), (50, -1, 4), (50, 60, -1), (1, 0, 0)))
def test_pairs_are_those_that_are_seen(n, left, right):
    assert attention.pairs(n, False, left, right) == reference.visible(n, n, right, left, "cpu").sum().item()
    causal = reference.visible(n, n, 0, left, "cpu").sum().item()
    assert attention.pairs(n, True, left, 0 if left < 0 else right) == causal


def test_every_shape_of_the_issue_is_asked_for():
    jobs = list(attention_forward.dense(attention_forward.SHAPES))
    assert len(jobs) == 30 and len({job.question.shape for job in jobs}) == 30
    assert all(sum(lengths) == 16384 for lengths in (attention_forward.MIXED,))
    assert (min(attention_forward.MIXED), max(attention_forward.MIXED)) == (1, 8192)
    assert set(attention_forward.QUICK) <= set(attention_forward.SHAPES)
    found = [len(list(section(attention_forward.BENCH.shapes[name])))
             for name, section in attention_forward.BENCH.sections.items()]
    assert found == [30, 6, 2, 10, 10, 2]


def test_shared_heads_are_beside_peers_and_beside_as_many_heads_alone():
    (shapes, peers), (same, alone) = [
        ([job.question.shape for job in found], {job.peer_names for job in found})
        for found in (list(section(((1024, 128), (4096, 128)))) for section in (attention_forward.gqa,
                                                                                attention_forward.mha))]
    assert shapes == same and peers == {("FA4", "cuDNN", "FA3")} and alone == {("32/32",)}


def test_a_window_s_bound_is_its_share_of_the_work():
    question = next(iter(attention_forward.window(((16384, 128),)))).question
    everything = 4 * 16 * 128 * 16384**2
    assert question.bound.at_least == pytest.approx(everything / question.work / 1.15)


@pytest.mark.parametrize("dim", (64, 96, 128, 192, 256))
@pytest.mark.parametrize("causal", (False, True))
def test_variants_can_run(dim, causal, capsys):
    for length in ("short", "medium", "long"):
        chosen = tune_attention.candidates(AttentionSpec("bf16", dim, causal, False), length, [])
        assert next(iter(chosen)) == "plan" and len(chosen) >= 4
        assert len(set(chosen.values())) == len(chosen)


def test_cases_are_those_of_the_text():
    first, second, *rest = tune_attention.cases("256:1024,mixed:causal; 192/128:4096:w1023:16/4")
    assert (first.dim, first.dim_v, first.length, first.heads) == (256, 256, 1024, 8)
    assert first.causal and first.left == -1
    assert second.varlen and second.spec.varlen and second.longest == 8192 and second.call.max_seqlen == 8192
    assert len(rest) == 1 and rest[0].spec.left and rest[0].spec.causal and rest[0].call.window == (1023, 0)
    assert (rest[0].dim_v, rest[0].heads, rest[0].kv_heads, rest[0].call.causal) == (128, 16, 4, False)
    assert first.flops() == 4 * 8 * 256 * 16 * 1024**2 / 2
    assert rest[0].flops() == 2 * 16 * 320 * 4 * attention.pairs(4096, True, 1023, 0)
    assert second.flops() == 4 * 8 * 256 * sum(n * n / 2 for n in attention_forward.MIXED)
    with pytest.raises(ValueError, match="masks|mask"):
        list(tune_attention.cases("128:1024:half"))
