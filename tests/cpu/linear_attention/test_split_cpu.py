"""Segments of few long sequences, where no GPU is needed: how many there are, that they are the whole, exactly and as
the kernels round, and what is launched."""
import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import normalize

import tkq
from tests.helpers.emulation import fake_gpu
from tests.helpers.linear_launches import launched
from tests.helpers.linear_segments import in_segments, reach
from tkq.linear_attention.catalog import expectation, shipped
from tkq.linear_attention.launch import Given, Steps, recipe
from tkq.linear_attention.plan import SHARED, plan
from tkq.linear_attention.spec import LinearSpec
from tkq.linear_attention.split.launch import recipe as combine
from tkq.linear_attention.split.launch import states_of
from tkq.linear_attention.split.plan import (
    BUSY,
    GAIN,
    LONG,
    MOST,
    SHORTEST,
    Sizes,
    Split,
    leaves_sms_idle,
    split,
    time,
)
from tkq.linear_attention.split.reach import NOTHING
from tkq.linear_attention.split.spec import CombineSpec, ReachSpec
from tkq.testing import sass

# ---- the plan ---------------------------------------------------------------------------------------------------

SIZES = [Sizes(B, H, S, 128, V, 132, delta, reverse) for B, H, S, V, delta, reverse in itertools.product(
    (0, 1, 2, 8, 300), (1, 16, 32, 80), (0, 1, 64, 511, 4096, 32768, 1 << 20), (64, 128, 256), (False, True),
    (False, True))]


def test_concurrent_launches():
    """Where waves of blocks, one launch after the other, leave a tenth of the SMs idle; never of segments."""
    one, pair = Split(2, 1), Split(2, 1, 2)
    for sms, heads, count in itertools.product((8, 132), range(1, 300), (2, 3)):
        busy = count * heads / (count * -(-heads // sms) * sms)
        assert leaves_sms_idle((((1, heads, 128), one),) * count, sms) == (busy < BUSY)
    assert leaves_sms_idle((((2, 80, 128), one), ((2, 80, 128), one), ((2, 80, 64), Split(1, 1))), 132)
    assert not leaves_sms_idle((((8, 80, 128), one),) * 3, 132)
    assert not leaves_sms_idle((((1, 4, 128), one), ((1, 4, 128), Split(2, 4))), 132)
    blocks = leaves_sms_idle((((1, 264, 64), pair),) * 2, 132), leaves_sms_idle((((1, 132, 256), one),), 264)
    assert blocks == (False, False), "two heads a block; two blocks a head"


def test_every_plan():
    """None is slower than whole sequences by its own count, leaves a segment without a chunk, cuts one shorter than
    launches are worth, or has more blocks than a grid."""
    for sizes in SIZES:
        how, chunks = split(sizes), -(-sizes.tokens // 64)
        usual = Split(min(2, -(-sizes.V // 64)), 1)
        assert how.groups in (1, 2) and how.segments >= 1 and how.heads == 1
        if how != usual:
            assert chunks >= LONG
            assert time(sizes, how) <= GAIN * time(sizes, usual)
        if how.segments > 1:
            each = -(-chunks // how.segments)
            assert each >= SHORTEST and (how.segments - 1) * each < chunks
            assert how.segments * sizes.sequences <= MOST


def test_sequences_that_fill_the_gpu_are_left_whole():
    for sizes in SIZES:
        tiles = -(-sizes.V // 128)
        if sizes.sequences * sizes.heads * tiles >= 4 * sizes.sms:
            assert split(sizes) == Split(min(2, -(-sizes.V // 64)), 1)


def test_longer_ones_have_no_fewer_segments():
    for delta, heads in itertools.product((False, True), (1, 4, 16, 32)):
        counts = [split(Sizes(1, heads, 1 << n, 128, 128, 132, delta)).segments for n in range(6, 21)]
        assert counts[0] == 1 and all(more >= 0.95 * fewer for fewer, more in itertools.pairwise(counts))
        assert (counts[-1] > 1) == (delta or heads < 32)  # where 64 columns a block are enough


@pytest.mark.parametrize("sizes, how", [
    # lightning attention: with as many segments as fill the SMs, memory would give keys and values twice
    (Sizes(1, 32, 32768, 128, 128, 132), Split(1, 1)), (Sizes(1, 16, 32768, 128, 128, 132), Split(1, 3)),
    # Gated DeltaNet: 32 blocks of 132 are four segments' 128; 64 are 128, whose scores have more registers
    (Sizes(1, 32, 32768, 128, 128, 132, True), Split(2, 4)), (Sizes(2, 32, 8192, 128, 128, 132, True), Split(1, 1)),
    (Sizes(1, 16, 32768, 128, 128, 132, True), Split(2, 8)),
    # its gradients' launches with second operands, which take as long as three of the others
    (Sizes(1, 32, 32768, 128, 128, 132, single=True, exact=True, second=True), Split(2, 4)),
    (Sizes(8, 32, 2048, 128, 128, 132, single=True, exact=True, second=True), Split(2, 1)),
    (Sizes(8, 32, 2048, 128, 128, 132), Split(2, 1)), (Sizes(8, 32, 2048, 128, 128, 132, True), Split(2, 1)),
    (Sizes(2, 80, 8192, 128, 64, 132), Split(1, 1))])
def test_calls_of_models(sizes, how):
    assert split(sizes) == how


# ---- the whole of them ------------------------------------------------------------------------------------------


def make(S=300, K=32, V=48, gate="token", dtype=torch.float64, decay=0.1):
    """q, k, v, g, beta; two heads of v share one of q and k."""
    torch.manual_seed(0)
    wide = torch.promote_types(dtype, torch.float32)
    q, k = (normalize(torch.randn(2, S, 2, K, dtype=torch.float64), dim=-1).to(dtype) for _ in range(2))
    v = torch.randn(2, S, 4, V, dtype=torch.float64).to(dtype)
    g = {"none": None, "head": -decay * torch.rand(4, dtype=wide), "token": -decay * torch.rand(2, S, 4, dtype=wide)}
    return q, k, v, g[gate], torch.rand(2, S, 4, dtype=wide)


def forms(S=300, dtype=torch.float64, decay=0.1):
    """Launches of each kind."""
    wide = torch.promote_types(dtype, torch.float32)
    q, k, v, g, beta = make(S, dtype=dtype, decay=decay)
    state, last = torch.randn(2, 4, 32, 48, dtype=wide), torch.float32
    heads, none, x = make(S, gate="head", dtype=dtype)[3], None, torch.randn_like(v)
    steps = Steps(torch.rand(2, S, 4, dtype=wide), -torch.rand(4, dtype=wide), None, False, 0.0, 1.0)
    return {
        "plain": Given(q, k, v, none, final=last), "heads": Given(q, k, v, heads, initial=state),
        "tokens": Given(q, k, v, g, initial=state, final=last),
        "reversed": Given(q, k, v, g, initial=state, final=last, reverse=True),
        "dots": Given(q, k, v, g, initial=state, final=last, x=x),
        "strict": Given(q, k, v, g, initial=state, final=last, x=x, reverse=True, strict=True),
        "delta": Given(q, k, v, g, beta, state, last), "delta without gates": Given(q, k, v, none, beta),
        "second query": Given(q, k, v, g, initial=state, final=last, x=x, q2=torch.randn_like(q)),
        "second pair": Given(q, k, v, g, initial=state, x=v, reverse=True, k2=torch.randn_like(k), v2=v),
        "updates": Given(k, k, v, g, beta, state, updates=True),
        "delta reversed": Given(k, q, v, g, beta, state, last, x, reverse=True,
                                inverse=launched(Given(q, k, v, g, beta, updates=True), 1.0).inverse),
        "steps": Given(q, k, v, initial=state.mT, final=last, steps=steps._replace(skip=torch.ones(4)),
                       state_v_first=True),
        "steps gated": Given(q, k, v, x=x, steps=steps._replace(gated=True), state_v_first=True),
        "steps reversed": Given(q, k, v, x=x, initial=state.mT, final=last, reverse=True, state_v_first=True,
                                steps=steps._replace(skip=torch.ones(4), skip_gradient=True)),
    }


def pairs(found, want):
    return [(name, x, y) for name, x, y in zip(found._fields, found, want) if y is not None]


@pytest.mark.parametrize("name", forms(1))
def test_segments_are_the_whole(name):
    """In float64, of 4 chunks in 2 and 4 segments: the algorithm, for each kind of launch."""
    given = forms(200)[name]
    for count in (2, 4):
        for what, mine, whole in pairs(in_segments(given, 0.3, count), launched(given, 0.3)):
            torch.testing.assert_close(mine, whole, rtol=1e-9, atol=1e-9, msg=f"{what}, {count}")


HARD = {"usual": (0.1, None, None), "decays that underflow": (20.0, None, None), "no decay": (0.0, None, None),
        "beta 1, keys alike": (0.0, 1.0, "identical"), "beta 2, keys alike": (0.0, 2.0, "identical"),
        "beta 2, keys near each other": (0.01, 2.0, "correlated"), "beta 2": (0.0, 2.0, None)}


@pytest.mark.parametrize("case", HARD)
def test_errors_of_rounding(case):
    """With operands of 16 bits: errors beside float64 are those of one launch, a fifth more at most."""
    decay, beta, keys = HARD[case]
    q, k, v, g, b = (x[:1, :512] for x in make(512, 64, 64, dtype=torch.bfloat16, decay=decay))
    k = k[:, :1].expand_as(k) if keys == "identical" else k
    if keys == "correlated":
        k = normalize(k[:, :1].float() + 0.3 * torch.randn(k.shape) / 8, dim=-1).to(k.dtype)
    if decay == 0.1:
        g[:, ::37] = -math.inf
    for given in (Given(q, k, v, g, final=torch.float32),
                  Given(q, k, v, g, b if beta is None else torch.full_like(b, beta), final=torch.float32)):
        exact = launched(given._replace(**{name: x if x is None else x.double() for name, x in zip(
            ("q", "k", "v", "g", "beta"), given)}), 0.125)
        whole, mine = launched(given, 0.125), in_segments(given, 0.125, 3)
        for (what, x, y), (_, other, _) in zip(pairs(mine, exact), pairs(whole, exact)):
            error, usual = ((z.double() - y).norm() / y.norm() for z in (x, other))
            assert error < 1.2 * usual + 1e-6, (what, error, usual)


# ---- what is launched -------------------------------------------------------------------------------------------


def operands(heads=2, S=8192, K=64, V=64):
    q, k = torch.zeros(2, 1, S, heads, K, dtype=torch.bfloat16)
    return q, k, torch.zeros(1, S, heads, V, dtype=torch.bfloat16)


def test_three_launches():
    """States that segments make, combined, and outputs: of the public op, with and without states. The delta rule's
    transfers are a launch of their own."""
    q, k, v = operands()
    g, beta, initial = torch.zeros(1, 8192, 2), torch.zeros(1, 8192, 2), torch.zeros(1, 2, 64, 64, dtype=torch.bfloat16)
    with fake_gpu.launches() as seen, torch.no_grad():
        tkq.linear_attn(q, k, v, g)
        tkq.gated_delta_rule(q, k, v, g, beta, initial_state=initial, output_final_state=True)
    count = split(Sizes(1, 2, 8192, 64, 64, 132)).segments
    specs = [r.args[0] for r, _ in seen]
    assert [s.part for s in specs if isinstance(s, LinearSpec)] == [
        "states", "outputs", "states", "transfers", "outputs"] and len(specs) == 7
    assert specs[1] == CombineSpec(64, "heads") and specs[5] == CombineSpec(64, "matrix", "bf16", "fp32")
    states, combined, outputs = (args for _, args in seen[:3])
    assert states[1][2] is None and states[1][5] is None and states[1][6].shape == (count, 2, 64, 64)
    assert combined[0].shape == (1, count, 2, 64, 64) and combined[1].shape == (1, count, 2)
    assert outputs[1][5].data_ptr() == combined[0].data_ptr() and outputs[1][6] is None
    (_, (states, matrices, first, last, columns, _)), (_, outputs) = seen[5:]
    assert states.shape[3:] == matrices.shape[3:] == (64, 64) and columns == 64
    assert first.data_ptr() == initial.data_ptr() and last.shape == (1, 2, 64, 64)
    assert outputs[1][5].shape[1:] == (2, 64, 64)


def test_launches_of_the_delta_rule_by_blocks():
    """Training: the forward's states and those of dV are made once, of the chunks that reach; what is launched is what
    the catalog has, but for dq and dk."""
    q, k, v = (x.requires_grad_() for x in operands(32, 4096, 128, 128))
    g, beta = -torch.ones(1, 4096, 32), torch.ones(1, 4096, 32, requires_grad=True)
    with fake_gpu.launches() as seen:
        tkq.gated_delta_rule(q, k, v, g.requires_grad_(), beta).backward(torch.zeros_like(v))
    specs = [r.args[0] for r, _ in seen]
    engine = [(s.part, s.reverse, s.blocks, s.second, s.reach) for s in specs if isinstance(s, LinearSpec)]
    assert engine == [
        ("states", False, False, None, True), ("transfers", False, False, None, True),
        ("outputs", False, True, None, False), ("states", True, True, None, True), ("outputs", True, True, None, False),
        ("outputs", False, False, "query", False), ("outputs", True, False, "pair", False)]
    assert specs[0] == ReachSpec("bf16", 128, "fp32")
    assert specs[3] == CombineSpec(128, "matrix", reach=True, halves=True)
    held = {kernel.recipe for kernel in shipped()}
    assert {r for r, _ in seen if getattr(r.args[0], "second", None) is None} <= held
    found, (_, first) = seen[0][1][3], seen[1]
    assert found.shape[0] == 2 and torch.equal(first[1][-1], found[0])
    starts, back = seen[3][1][0], seen[6][1][0]  # what was combined, of halves
    for (_, args), of in ((seen[8], starts[0, 0]), (seen[9], back[0, 1])):
        assert args[1][5].data_ptr() == of.data_ptr() and len(args[1][5]) == 4
    assert starts.shape[1] == back.shape[1] == found.shape[1] == 8


def test_a_forward_alone_asks_for_one_way():
    q, k, v = (torch.zeros(1, 1, heads, 128, dtype=torch.bfloat16).expand(-1, 32768, -1, -1) for heads in (16, 16, 32))
    g, beta = torch.zeros(2, 1, 32768, 32)
    with fake_gpu.launches() as seen, torch.no_grad():
        tkq.gated_delta_rule(q, k, v, g, beta)
    (reach, (_, _, _, found)), *_, (combined, args), _ = seen
    assert reach.args == (ReachSpec("bf16", 128, "fp32"),) and found.shape == (1, 8, 32)
    assert combined.args[0].halves and args[-1].shape == (1, 1, 8, 32)


@pytest.mark.parametrize("decay, beta, longer", [(1.0, None, 1.0), (1.0, 0.9, 1.6), (5.0, 2.0, 1.0)])
def test_what_does_not_reach_leaves_nothing(decay, beta, longer):
    """In float64: of a state before the chunks that reach, in either order, nothing is left behind them."""
    q, k, v, g, b = make(1024, 32, 32, decay=decay)
    k, b = longer * k, b if beta is None else torch.full_like(b, beta)
    before = torch.randn(2, 4, 32, 32).double()
    for count, reverse in zip(reach(k, g, b, 1, NOTHING)[0][:, 0].amax(1).tolist(), (False, True)):
        assert 0 < count < 16
        at = slice(None, 64 * count) if reverse else slice(1024 - 64 * count, None)
        part = Given(*(x[:1, at] for x in (q, k, v, g, b)), initial=before[:1], final=torch.float32)
        if reverse:  # from the last token to the first, as a forward
            part = part._replace(**{name: getattr(part, name).flip(1) for name in ("q", "k", "v", "g", "beta")})
        left = launched(part, 1.0).state - launched(part._replace(initial=None), 1.0).state
        assert left.norm() <= 2.0**NOTHING * before[:1].norm()


def test_packed_sequences_and_pools_are_left_whole():
    q, k, v = operands()
    cu, pool, rows = torch.tensor([0, 8192]), torch.zeros(3, 2, 64, 64), torch.zeros(1, dtype=torch.int32)
    with fake_gpu.launches() as seen, torch.no_grad():
        tkq.linear_attn(q, k, v, cu_seqlens=cu)
        tkq.linear_attn(q, k, v, initial_state=pool, state_indices=rows)
    assert [r.args[0].part for r, _ in seen] == [None, None]


def test_states_have_one_kernel():
    """For a forward, corrected values and outputs that are gated: what decides outputs alone is not in the key."""
    from tkq.linear_attention.launch import spec_of

    q, k, v = operands()
    beta, dt, A = torch.zeros(1, 8192, 2), torch.zeros(1, 8192, 2), torch.zeros(2)
    delta = Given(q, k, v, None, beta)
    assert spec_of(states_of(delta)) == spec_of(states_of(delta._replace(q=k, updates=True)))
    steps = Steps(dt, A, None, True, 0.0, math.inf)
    ssd = Given(q, k, v, steps=steps, state_v_first=True)
    gated = ssd._replace(x=v, steps=steps._replace(skip=torch.ones(2), gated=True))
    assert spec_of(states_of(ssd)) == spec_of(states_of(gated))


STATES = LinearSpec("bf16", 128, 128, "token", None, "fp32", part="states")
HALVES = dict(reach=True, halves=True)
OF_BLOCKS = replace(STATES, delta="fp32", initial="fp32", final=None, part="outputs", blocks=True)
KERNELS = {"states": STATES, "outputs": replace(STATES, initial="fp32", final=None, part="outputs"),
           "delta states": replace(STATES, delta="fp32", inverse="out", **HALVES),
           "delta transfers": replace(STATES, delta="fp32", inverse="in", part="transfers", reach=True),
           "delta outputs": replace(STATES, delta="fp32", initial="fp32", final=None, part="outputs", inverse="in"),
           "delta reversed": replace(STATES, delta="fp32", reverse=True, inverse="in"),
           "states of two heads": replace(STATES, value_dim=64),
           "outputs by blocks": replace(OF_BLOCKS, updates=True), "forward by blocks": OF_BLOCKS,
           "overlapping": replace(OF_BLOCKS, part=None, blocks=False, reach=True, final="fp32"),
           "states by blocks": replace(STATES, delta="fp32", reverse=True, blocks=True, **HALVES),
           "gradients by blocks": replace(OF_BLOCKS, reverse=True, dot=True),
           "sums": replace(STATES, dot=True), "sums of pairs": replace(STATES, dot=True, second="pair", reverse=True)}


def heads_of(name):
    """Of a block."""
    return 1 + name.endswith("two heads")


# Of outputs, of what a delta rule hands on and of sums those with the fewest registers to spare; states alone, which
# have the most waits.
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.sampled(when=lambda name: name in ("states", "delta transfers", "gradients by blocks", "sums of pairs",
                                           "overlapping"))
@pytest.mark.machine_code(recipe=lambda name: recipe(KERNELS[name], heads=heads_of(name)))
def test_kernels_of_segments(name, machine_code):
    """No spills, but a few numbers of outputs by blocks and of overlapping segments; states alone load no
    queries and store nothing by TMA but inverses."""
    sass.assert_sass(machine_code, expectation(KERNELS[name], heads_of(name)))


@pytest.mark.parametrize("transfer, initial, final", [("heads", "bf16", "fp32"), ("matrix", None, "fp32"),
                                                      ("columns", "fp32", None), ("transposed", None, None)])
@pytest.mark.machine_code(recipe=lambda transfer, initial, final: combine(
    CombineSpec(128, transfer, initial, final, True)))
def test_kernels_that_combine(transfer, initial, final, machine_code):
    kernel, = machine_code
    assert kernel.stack == 0 and kernel.opcodes.get("LDG.E.128", 0) == (0 if transfer == "matrix" else 8)


@pytest.mark.parametrize("K, V", [(32, 32), (96, 80), (128, 128), (128, 256)])
@pytest.mark.parametrize("delta", [None, "fp32"])
def test_one_group_has_room(K, V, delta):
    c = plan(LinearSpec("bf16", K, V, "token", delta=delta), 1)
    assert c.groups == 1 and c.stages >= 2
    rest = c.score_stages + c.outputs + 4 * bool(delta)
    assert c.stages * (4 * 64 * K + 8192) + rest * 8192 <= SHARED


@pytest.mark.parametrize("given", [dict(part="outputs"), dict(part="states"), dict(part="all"),
                                   dict(part="states", final="fp32", packed="int32"),
                                   dict(part="states", final="bf16"), dict(part="transfers", final="fp32"),
                                   dict(part="outputs", initial="fp32", final="bf16")])
def test_what_a_spec_refuses(given):
    with pytest.raises(ValueError, match="LinearSpec: part"):
        LinearSpec("bf16", 64, 64, **given)


@pytest.mark.parametrize("given, words", [
    (dict(delta=None, inverse=None), "reach"), (dict(gate="none"), "reach"),
    (dict(part="outputs", initial="fp32", final=None, inverse="in", halves=False), "reach"),
    (dict(reach=False), "halves"), (dict(part="transfers", inverse="in"), "halves"),
    (dict(blocks=True, inverse=None), "blocks")])
def test_what_a_spec_of_what_reaches_refuses(given, words):
    with pytest.raises(ValueError, match=f"LinearSpec: {words}, allowed is with"):
        replace(KERNELS["delta states"], **given)


@pytest.mark.parametrize("given", [dict(dtype="fp32"), dict(head_dim=96), dict(beta="fp16")])
def test_what_a_spec_of_reach_refuses(given):
    name, = given
    with pytest.raises(ValueError, match=f"ReachSpec: {name} is "):
        ReachSpec(**dict(dtype="bf16", head_dim=64, beta="fp32") | given)


@pytest.mark.parametrize("given, words", [(dict(head_dim=40), "head_dim is 40"), (dict(transfer="all"), "transfer"),
                                          (dict(initial="fp16"), "initial"), (dict(final="fp16"), "final"),
                                          (dict(reach=True), "reach"), (dict(transfer="heads", reach=True), "reach"),
                                          (dict(transfer="matrix", halves=True), "halves")])
def test_what_a_spec_of_combined_states_refuses(given, words):
    with pytest.raises(ValueError, match=f"CombineSpec: {words}"):
        CombineSpec(**dict(head_dim=64) | given)
