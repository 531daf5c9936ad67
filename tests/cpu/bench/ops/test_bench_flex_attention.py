"""The benchmark of flex_attention, as far as it goes without a GPU: its masks, candidates, errors and bounds."""
import importlib.util

import pytest
import torch

from bench.core.results import Bound, Case
from bench.ops import flex_attention as bench
from bench.peers import attention, common, flex, flex_masks
from bench.peers.flex_masks import BESIDE, KINDS, SAME, Size
from tests.helpers.attention.flex_gallery import visible
from tkq.testing.timing import Comparison, Timing

CPU, SIZE = torch.device("cpu"), Size(2, 1, 1280, 16)  # longer than the window
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def tensors(i=0):
    g = torch.Generator().manual_seed(i)
    return tuple(torch.randn(SIZE.batch, SIZE.length, SIZE.heads, SIZE.dim, generator=g).bfloat16() for _ in range(3))


def changed(x):
    """With another first head."""
    x = x.clone()
    x[0, :, 0] *= 2
    return x


@each_kind
def test_pairs_are_those_that_are_seen(kind):
    seen = visible(kind.mask(SIZE, CPU), SIZE.batch, 1, SIZE.length, SIZE.length, CPU).sum().item()
    on_diagonals = 0 if kind.name == "sliding-window" else SIZE.batch * SIZE.length / 2  # causal counts half of all
    prefixes = sum(flex_masks.prefixes(SIZE)) / 2 if kind.each else 0  # of which the half below has been counted
    assert kind.pairs(SIZE) == seen - on_diagonals + prefixes


def test_masks_are_those_of_the_issue():
    size = Size(*bench.SHAPES[0])
    assert str(size) == "B2 S16384 H16 D128"
    assert flex_masks.lengths(size) == flex_masks.DOCUMENTS
    assert len(flex_masks.DOCUMENTS) == 8 and sum(flex_masks.DOCUMENTS) == size.length == 8 * 2048
    assert flex_masks.prefixes(size) == flex_masks.PREFIXES
    assert sum(flex_masks.lengths(SIZE)) == SIZE.length and flex_masks.WINDOW == 1024
    assert flex.starts(SIZE, CPU).tolist()[8:10] == [1280, 1280 + flex_masks.lengths(SIZE)[0]]


@each_kind
@pytest.mark.sampled(when=lambda kind: kind.name in ("document", "softcap"))
def test_candidates_of_the_forward_are_right_and_what_is_wrong_is_seen(kind, monkeypatch):
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(bench, "ROWS", 500)
    given, error = tensors(), bench.error(kind, SIZE, "forward")
    found = flex.ours(kind, SIZE)(*given)
    assert found.shape == given[0].shape and error("tkq", given, found) < 4e-3
    assert error("tkq", given, changed(found)) > 0.5
    theirs = flex.of_flex(torch.compile(flex_attention, backend="aot_eager", fullgraph=True), kind, SIZE)
    assert error(flex.TRITON, given, theirs(*given)) < 4e-3
    own = flex.own(kind, SIZE)(*given)
    assert own.shape == given[0].shape
    if kind.same:
        assert error(SAME, given, own) < 4e-3
    else:
        assert kind.own == BESIDE and error(BESIDE, given, own) is None
        assert error("tkq", given, own) > 0.02  # another problem


@pytest.mark.parametrize("name", ("causal", "document", "sliding-window", "prefix-LM", "softcap"))
@pytest.mark.sampled(when=lambda name: name in ("document", "softcap"))
def test_candidates_of_the_backward_are_right_and_what_is_wrong_is_seen(name, monkeypatch):
    monkeypatch.setattr(bench, "ROWS", 500)
    monkeypatch.setattr(attention, "inputs", lambda *_: tensors)
    kind = KINDS[name]
    given, error = bench.inputs(kind, SIZE, "backward")(0), bench.error(kind, SIZE, "backward")
    do, q, k, v, o, lse = given
    assert o.shape == q.shape and lse.shape == (SIZE.batch, SIZE.heads, SIZE.length) and not torch.equal(do, q)
    found = flex.ours_backward(kind, SIZE)(*given)
    assert [x.shape for x in found] == [x.shape for x in (q, k, v)] and error("tkq", given, found) < 4e-3
    for i in range(3):
        assert error("tkq", given, [changed(x) if i == j else x for j, x in enumerate(found)]) > 0.5
    own = flex.own_backward(kind, SIZE)
    assert [x.shape for x in own(*given)] == [x.shape for x in (q, k, v)]
    if kind.same:
        assert error(SAME, given, own(*given)) < 4e-3


def test_a_graph_is_recorded_once_for_its_inputs():
    calls = []

    def forward(q, k, v):
        calls.append(q)
        return q * k + v

    run = flex.recorded(forward)
    given, (do, *_) = tensors(), tensors(1)
    with torch.no_grad():
        for _ in range(2):
            dq, dk, dv = run(do, *given, None, None)
    assert len(calls) == 1 and not given[0].requires_grad
    assert torch.equal(dq, do * given[1]) and torch.equal(dk, do * given[0]) and torch.equal(dv, do)
    other = [x.clone() for x in given]
    run(do, *other, None, None)
    assert len(calls) == 2


@pytest.mark.parametrize("name", bench.MASKS)
def test_block_masks_are_judged(name):
    from torch.nn.attention.flex_attention import create_block_mask

    given = bench._mask_inputs(KINDS[name], Size(1, 1, 1280, 128), 0, "cpu")
    ours = flex.block_mask()(*given)
    mask_mod, n, device = given
    assert bench._mask_inputs(KINDS[name], Size(1, 1, 1280, 128), 1, "cpu")[0] is mask_mod
    assert bench.mask_error("tkq", given, ours) == 0
    assert bench.mask_error("torch.compile", given, create_block_mask(mask_mod, None, None, n, n, device=device)) == 0
    for listed in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        wrong = flex.block_mask()(*given)
        getattr(wrong, listed)[0, 0, 5] += 1
        assert bench.mask_error("tkq", given, wrong) == 1, listed


def test_every_mask_has_a_case_that_its_name_chooses():
    for section, op, shape in (("forward", "flex_attention", bench.SHAPES), *(
            ("backward", "flex_attention_backward", shapes) for shapes in (bench.SHAPES, bench.WIDE))):
        assert set(shape) <= set(bench.BENCH.shapes[section])
        jobs = list(bench.BENCH.sections[section](shape))
        names = [f"{job.question.op} {job.question.shape}" for job in jobs]
        assert [[name for name in names if kind in name] for kind in KINDS] == [[name] for name in names]
        assert all(job.question.op == op and job.peer_names[1:] == (flex.TRITON, flex.FA4) for job in jobs)
        assert {job.peer_names[0] for job in jobs} == {SAME, BESIDE}
    assert len(list(bench.block_masks(bench.BLOCK_MASK_SHAPES))) == 2


def test_peers_are_made_of_what_a_case_says_and_a_missing_one_is_named():
    for jobs in (bench.jobs("forward", bench.SHAPES), bench.jobs("backward", bench.SHAPES),
                 bench.block_masks(bench.BLOCK_MASK_SHAPES)):
        for job in jobs:
            found, missing = common.find(job.peer_op, job.peer_names, **job.peer_options)
            assert (*found, *missing) == job.peer_names and all(map(callable, found.values()))
            there = importlib.util.find_spec("flash_attn") is not None
            assert all(name == flex.FA4 and not there and "No module named" in why for name, why in missing.items())


def test_bounds():
    jobs = {section: {job.question.shape.split()[0]: job.question for job in bench.jobs(section, bench.SHAPES)}
            for section in ("forward", "backward")}
    for section, at_least in (("forward", 0.95), ("backward", 0.90)):
        assert all(q.bound == Bound((flex.FA4,), 1.15) and q.instead == Bound((flex.TRITON,), 1.5)
                   for q in jobs[section].values())
        assert {name: q.roof for name, q in jobs[section].items() if q.roof.against == (SAME,)} == dict.fromkeys(
            ("causal", "document", "sliding-window"), Bound((SAME,), at_least))
        assert jobs[section]["ALiBi"].roof == jobs[section]["softcap"].roof == Bound((BESIDE,), 0.85)
        prefix, causal = jobs[section]["prefix-LM"], jobs[section]["causal"]
        assert prefix.roof.at_least == pytest.approx(0.9 * causal.work / prefix.work)
        assert causal.work == (4 if section == "forward" else 10) * 2 * 16 * 128 * 16384**2 / 2


def test_what_is_below_the_bound_beside_triton_is_named():
    def case(against, triton_ms):
        timings = tuple(Timing(name, "graph", (ms,) * 7) for name, ms in (("tkq", 1.0), (flex.TRITON, triton_ms)))
        return Case("forward", "flex_attention", "causal", "TFLOP/s", 1e9, Comparison(timings, 2, 1, 1),
                    bound=Bound((against,), 1.15))

    assert bench.judge([case(flex.FA4, 1.49), case(flex.TRITON, 1.2)]) == []  # the second is the case's own bound
    assert bench.judge([case(flex.FA4, 1.4)]) == ["flex_attention causal: 1.400x FlexAttention, bound 1.5"]
