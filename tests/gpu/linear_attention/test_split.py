"""Few long sequences in segments, against the whole in float64, beside one launch in plain PyTorch, rounded as the
kernel rounds."""
import math

import pytest
import torch
from torch.nn.functional import normalize

import tkq
from tests.gpu.linear_attention.test_delta_launches import neighbours, some_small
from tests.gpu.linear_attention.test_linear_forward import make
from tests.helpers.linear_launches import launched, of_gradients
from tests.helpers.linear_segments import reach
from tests.helpers.one_sign import bias_of_one_sign
from tests.helpers.sanitizer.nan_fill import poisoned
from tkq.linear_attention import launch as engine
from tkq.linear_attention.config import ALL
from tkq.linear_attention.launch import Given, Steps
from tkq.linear_attention.split import launch as split_launch
from tkq.linear_attention.split.launch import in_segments, split_of
from tkq.linear_attention.split.plan import Split
from tkq.linear_attention.split.reach import NOTHING
from tkq.linear_attention.split.spec import CombineSpec
from tkq.reference.linear_attention import gated_delta_rule_backward
from tkq.reference.linear_attention import linear_attn as recurrence
from tkq.runtime.device import arch
from tkq.testing import assert_2x

BF16, F32 = torch.bfloat16, torch.float32


def wide(given):
    steps = given.steps and given.steps._replace(**{name: x.double() for name, x in given.steps._asdict().items()
                                                    if isinstance(x, torch.Tensor)})
    return given._replace(steps=steps, **{name: x.double() for name, x in given._asdict().items()
                                          if isinstance(x, torch.Tensor)})


def check(given, count, scale=0.125, groups=1, heads=1):
    with poisoned():
        found = in_segments(given, scale, Split(groups, count, heads))
    peer, exact = launched(given, scale), launched(wide(given), scale)
    assert (found.state is None) == (given.final is None)
    for what, mine, want, other in zip(found._fields, found, exact, peer):
        if want is None or (what == "inverse" and given.blocks):
            continue
        # tensor cores cut off what they add to a sum of fp32: an ulp for each 16 tokens at most
        ulps = 1 + given.q.shape[1] / 16 if mine.dtype == F32 else 1
        if what == "of_skip":
            mine = mine.unflatten(0, (-1, count)).sum(1)
        rows = (x.reshape(-1, x.shape[-1]) for x in (mine, want, other))
        mine, want, other = rows if what in ("state", "dots", "of_skip", "diagonal") else (mine, want, other)
        assert_2x(mine, want, other, ulps=ulps, bias_ulps=bias_of_one_sign(want, other, ulps), what=what)
    return found


def state_of(v, K=64, dtype=F32):
    return torch.randn(len(v), v.shape[2], K, v.shape[3], device="cuda").to(dtype)


def beta_of(v):
    return torch.rand(v.shape[:3], device="cuda")


def test_growth_behind_zeros():
    """Gates above 0 whose product over a segment is infinite: of a state of zeros nothing comes."""
    q, k, v, g = make(1, 1216, 1, 1, 64, 64, "token")
    v[:, :-100] = 0.0
    g = torch.full_like(g, 0.3)
    g[:, -100:] = -0.1
    with poisoned():
        found = in_segments(Given(q, k, v, g), 0.125, Split(1, 2))
    assert torch.equal(found.o[:, :-100], torch.zeros_like(found.o[:, :-100])) and found.o[:, -100:].isfinite().all()


@pytest.mark.parametrize("S, count", [(129, 2), (1000, 5), (130, 8), (64 * 19, 19)])
def test_gates_of_tokens(S, count):
    """Also segments without a chunk, and more than are read at once."""
    q, k, v, g = make(2, S, 2, 4, 64, 64, "token")
    check(Given(q, k, v, g, initial=state_of(v), final=F32), count)


@pytest.mark.parametrize("decay", [20.0, math.inf])
def test_decays_that_leave_nothing(decay):
    q, k, v, g = make(1, 500, 2, 2, 64, 64, "token", decay=min(decay, 0.1) if decay == math.inf else decay)
    if decay == math.inf:
        g[:, ::37] = -math.inf
    check(Given(q, k, v, g, initial=state_of(v), final=F32), 4)


@pytest.mark.parametrize("gate", ["none", "head"])
@pytest.mark.sampled(when=lambda gate: False)
def test_other_gates(gate):
    q, k, v, g = make(1, 300, 1, 2, 64, 64, gate)
    check(Given(q, k, v, g, final=F32), 3)


@pytest.mark.parametrize("S, count", [(129, 2), (1000, 5), (130, 8)])
def test_the_delta_rule(S, count):
    """V of 80 columns, behind which the identity begins with the next 64; two warpgroups of states."""
    q, k, v, g = make(2, S, 2, 4, 96, 80, "token")
    check(Given(q, k, v, g, beta_of(v), state_of(v, 96), F32), count, groups=2)


@pytest.mark.parametrize("keys, beta, decay", [
    ("identical", 1.0, 0.0), ("identical", 2.0, 0.0), ("correlated", 2.0, 0.1), ("random", 2.0, 0.0),
    ("random", 1.0, 20.0)])
def test_hard_transfers(keys, beta, decay):
    q, k, v, g = make(1, 256, 2, 2, 96, 80, "token", decay=decay)
    if keys == "identical":
        k = k[:, :1].expand_as(k).contiguous()
    elif keys == "correlated":
        k = normalize(k[:, :1].float() + 0.3 * torch.randn(k.shape, device="cuda") / 8, dim=-1).to(k.dtype)
    check(Given(q, k, v, g, torch.full(v.shape[:3], beta, device="cuda"), state_of(v, 96), F32), 2, groups=2)


@pytest.mark.parametrize("what", ["updates", pytest.param("reversed", marks=pytest.mark.slow)])
def test_corrected_values(what):
    q, k, v, g = make(1, 300, 2, 4, 64, 64, "token")
    forward = Given(q, k, v, g, beta_of(v), state_of(v), F32)
    given = of_gradients(forward, what == "reversed")
    if given.reverse:
        given = given._replace(transfers=in_segments(of_gradients(forward, False), 0.125, Split(1, 3)).transfers)
    check(given, 3)


def of_all_kinds(B, S, heads, K, V):
    """q, k, v, g, beta; heads of which all, some and one in four chunks' decays leave something for the next segment,
    and one with a reset."""
    q, k, v, g = make(B, S, heads // 2, heads, K, V, "token")
    g = -torch.tensor([0.002, 0.3, 1.0, 0.1], device="cuda").repeat(heads // 4) * torch.rand_like(g)
    g[:, S // 2, 3::4] = -120.0
    return q, k, v, g, beta_of(v)


@pytest.mark.parametrize("S, count", [(2000, 3), (130, 8), (3000, 1)])
@pytest.mark.parametrize("longer", [False, True])
def test_chunks_that_reach_a_segments_end(S, count, longer):
    """Against float64, but where a bound is within rounding; NaN behind the end. With longer keys a state grows."""
    _, k, v, g, beta = of_all_kinds(2, S, 4, 128, 32)
    if longer:
        lengths = torch.tensor([1.3, 1.6], device="cuda")[:, None]
        k, beta = (lengths * k.float()).to(k.dtype), torch.full_like(beta, 0.9)
    held = [torch.full((2, S + 70, *x.shape[2:]), math.nan, device="cuda", dtype=x.dtype) for x in (k, g, beta)]
    for x, y in zip(held, (k, g, beta)):
        x[:, :S] = y
    k, g, beta = (x[:, :S] for x in held)
    with poisoned():
        found = split_launch.reach_of(Given(k, k, v, g, beta, segments=count))
    want, near = reach(k, g, beta, count, NOTHING)
    assert (near > 0.01).float().mean() > 0.9
    assert torch.equal(found[near > 0.01], want[near > 0.01])
    if S == 2000:
        assert (want <= 11).any() and (want == ALL).any()


@pytest.mark.parametrize("count", [3, 2])
def test_segments_by_blocks(count):
    """The delta rule's forward and dV where gates decide what reaches a segment's end, in the order of the tokens and
    reversed; heads of all kinds, segments of 11 chunks and of twice 8, of one with two resets in a first half."""
    q, k, v, g, beta = of_all_kinds(1, 2000, 4, 128, 128)
    if count == 2:
        g[:, 299:301, 0] = -120.0
    forward = Given(q, k, v, g, beta, state_of(v, 128), F32, blocks=True)
    made = check(forward._replace(updates=True), count, 0.1, groups=2)
    assert made.inverse is None and made.reach.shape[1] == len(made.transfers) == (4 if count == 2 else 3)
    nothing = made.reach[0] < ALL
    assert nothing.any() and made.transfers[nothing].isnan().all() and made.transfers[~nothing].isfinite().all()
    check(of_gradients(forward, True)._replace(inverse=None, transfers=made.transfers, reach=made.reach,
                                               halves=count == 2), count, 0.1, groups=2)


def test_what_leaves_nothing_one_way():
    """Keys that let a state grow in front of two decays: by bounds a segment leaves nothing in the order of the tokens,
    and something reversed, where no transfer was stored. None is read."""
    q, k, v, g, beta = of_all_kinds(1, 2048, 4, 128, 128)
    k, beta, g[:] = (1.6 * k.float()).to(k.dtype), torch.full_like(beta, 0.9), 0.0
    g[:, 510::512], g[:, 511::512] = -120.0, -120.0
    forward = Given(q, k, v, g, beta, state_of(v, 128), F32, blocks=True)
    made = check(forward._replace(updates=True), 2, 0.1, groups=2)
    assert (made.reach[0] == 1).all() and (made.reach[1] == ALL).all() and made.transfers.isnan().all()
    check(of_gradients(forward, True)._replace(inverse=None, transfers=made.transfers, reach=made.reach, halves=True),
          2, 0.1, groups=2)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.sampled(when=lambda reverse: False)
def test_sums_of_outputs(reverse):
    q, k, v, g = make(1, 300, 2, 2, 64, 64, "token")
    check(Given(q, k, v, g, initial=state_of(v), final=F32, x=torch.randn_like(v), reverse=reverse), 3)


@pytest.mark.parametrize("second", ["query", "pair"])
@pytest.mark.sampled(when=lambda second: second == "pair")
def test_second_operands(second):
    """As the delta rule's gradients have them."""
    v, v2, q, g = make(1, 300, 2, 4, 64, 64, "token")  # heads share values
    given = Given(q, torch.randn_like(q), v, g, initial=torch.randn(1, 4, 64, 64, device="cuda"), kept=some_small(q))
    if second == "query":
        check(given._replace(q2=torch.randn_like(q), x=torch.randn_like(v), final=F32), 3)
    else:
        check(given._replace(k2=torch.randn_like(q), v2=v2, x=v2, reverse=True), 3)


@pytest.mark.slow  # without segments they are everyday's, test_delta_launches.py
@pytest.mark.parametrize("second", ["query", "pair"])
def test_outputs_of_neighbours(second):
    check(neighbours(second, False), 3, groups=2)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.sampled(when=lambda reverse: reverse)
def test_steps(reverse):
    """Mamba-2's: with D, reversed with the sums that its gradient is made of."""
    C, B, x, _ = make(1, 300, 1, 2, 64, 64, "none")
    steps = Steps(torch.rand(1, 300, 2, device="cuda"), -torch.rand(2, device="cuda"), None, False, 0.0, 1.0,
                  torch.randn(2, device="cuda"), skip_gradient=reverse)
    check(Given(C, B, x, initial=state_of(x).mT.contiguous(), final=F32, steps=steps, reverse=reverse,
                x=torch.randn_like(x) if reverse else None, state_v_first=True), 3)


@pytest.mark.parametrize("transfer, reverse, N, K, V, dtype", [
    ("heads", False, 9, 96, 80, BF16), ("none", True, 3, 32, 32, F32), ("columns", True, 20, 64, 48, F32),
    ("matrix", True, 5, 96, 80, BF16), ("matrix", False, 1, 32, 100, F32), ("transposed", True, 5, 96, 80, BF16)])
@pytest.mark.sampled(when=lambda transfer, N: transfer in ("columns", "transposed") and N > 1)
def test_combined_states(transfer, reverse, N, K, V, dtype):
    """Of any strides; against float64."""
    torch.manual_seed(0)
    states = torch.randn(2, N, 3, V, K, device="cuda") / K**0.5
    decays = {"heads": torch.rand(2, N, 3, device="cuda"), "columns": torch.rand(2, N, 3, K, device="cuda"),
              "none": None}
    decays = decays.get(transfer, torch.randn(2, N, 3, K, K, device="cuda") / K**0.5)
    initial = torch.randn(2, 3, K, V, device="cuda").to(dtype).mT
    final = torch.full((3, 2, V, K), math.nan, device="cuda").transpose(0, 1)
    want, s = torch.empty_like(states[:, :, :, :V], dtype=torch.float64), initial.double()
    for n in reversed(range(N)) if reverse else range(N):
        want[:, n] = s
        added = states[:, n, :, :V].double()
        if transfer in ("matrix", "transposed"):
            matrix = decays[:, n].double()
            s = s @ (matrix.mT if transfer == "transposed" else matrix) + added
        else:
            s = added + s * (1.0 if decays is None else decays[:, n].double().reshape(2, 3, 1, -1))
    name = {BF16: "bf16", F32: "fp32"}[dtype]
    split_launch.run(CombineSpec(K, transfer, name, "fp32", reverse), states, decays, initial, final, V, None)
    torch.testing.assert_close(states[:, :, :, :V].double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(final.double(), s, rtol=1e-5, atol=1e-5)


def test_the_same_bits():
    q, k, v, g = make(1, 1000, 2, 4, 96, 80, "token")
    given = Given(q, k, v, g, beta_of(v), state_of(v, 96), F32)
    first = in_segments(given, 0.1, Split(2, 5))
    for _ in range(4):
        again = in_segments(given, 0.1, Split(2, 5))
        assert torch.equal(first.o, again.o) and torch.equal(first.state, again.state)


def test_nothing_behind_the_end_counts():
    """NaN in the rows behind each tensor's own, and in another segment's place."""
    def behind(x):
        held = torch.full((1, 400, *x.shape[2:]), math.nan, device="cuda", dtype=x.dtype)
        held[:, :200] = x
        return held[:, :200]
    for K, V in ((64, 64), (96, 80)):
        given = make(1, 200, 2, 2, K, V, "token")
        given = given if K == 64 else (*given, beta_of(given[2]))
        found = in_segments(Given(*given, final=F32), 0.125, Split(2, 3))
        again = in_segments(Given(*map(behind, given), final=F32), 0.125, Split(2, 3))
        assert torch.equal(found.o, again.o) and torch.equal(found.state, again.state)


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.sampled(when=lambda delta: not delta)
def test_the_op_plans_it(delta):
    """Two heads of 8,192 tokens: segments, and results beside those of whole sequences; with a state, in a graph."""
    q, k, v, g = make(1, 8192, 2, 2, 64, 64, "token", decay=0.01)
    more = (beta_of(v),) * delta
    op, initial = tkq.gated_delta_rule if delta else tkq.linear_attn, state_of(v)
    given = Given(q, k, v, g, *(more or (None,)), initial, F32)
    assert arch.num_sms(q.device) >= 64 and split_of(given).segments > 4
    o, state = op(q, k, v, g, *more, initial_state=initial, output_final_state=True)
    whole = engine.launch(given, 0.125)
    want, last = recurrence(q.double(), k.double(), v.double(), g, initial_state=initial, beta=(more or (None,))[0])
    for mine, other, exact in ((o, whole.o, want), (state, whole.state, last)):
        room = 513 if mine.dtype == F32 else 1
        rows = [x.flatten(0, -2) if mine.dtype == F32 else x for x in (mine, exact, other)]
        assert_2x(*rows, ulps=room, bias_ulps=bias_of_one_sign(rows[1], rows[2], room))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = op(q, k, v, g, *more, initial_state=initial, output_final_state=True)
    graph.replay()
    assert torch.equal(replayed[0], o) and torch.equal(replayed[1], state)


def test_gradients_of_segments_by_blocks():
    """Of 32 heads the first eight beside float64; the same bits again. Segments of twice 8 chunks."""
    q, k, v, g, beta = of_all_kinds(1, 4096, 32, 128, 128)
    do = torch.randn_like(v)

    def gradients():
        leaves = [x.detach().requires_grad_() for x in (q, k, v, g, beta)]
        return torch.autograd.grad(tkq.gated_delta_rule(*leaves), leaves, do)

    how = split_of(Given(q, k, v, g, beta, updates=True))
    assert how.groups == 2 and how.segments > 1
    with poisoned():
        mine = gradients()
    assert all(map(torch.equal, mine, gradients()))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(split_launch, "split_of", lambda given: Split(2, 1))
        whole = gradients()
    few = [x[:, :, :8 * x.shape[2] // 32].double() for x in (do, q, k, v, g, beta)]
    want = gated_delta_rule_backward(few[0], None, *few[1:], None, 128**-0.5)
    for name, x, y, exact in zip(("q", "k", "v", "g", "beta"), mine, whole, want):
        for head in range(exact.shape[2]):  # of its own size each
            error, usual = ((z[:, :, head].double() - exact[:, :, head]).norm() for z in (x, y))
            assert error < 1.3 * usual, (name, head, error, usual)


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.sampled(when=lambda delta: False)
def test_gradients_through_segments(delta):
    """Beside those of whole sequences, which other tests judge: as near as rounding leaves both."""
    leaves = [x.requires_grad_() for x in make(1, 4096, 1, 2, 64, 64, "token", decay=0.05)]
    leaves += [beta_of(leaves[2]).requires_grad_()] * delta + [state_of(leaves[2]).requires_grad_()]
    op = tkq.gated_delta_rule if delta else tkq.linear_attn
    incoming = torch.randn_like(leaves[2]), state_of(leaves[2])

    def gradients():
        found = op(*leaves[:-1], initial_state=leaves[-1], output_final_state=True)
        return torch.autograd.grad(found, leaves, incoming)

    mine = gradients()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(split_launch, "split_of", lambda given: Split(1, 1))
        theirs = gradients()
    assert not all(map(torch.equal, mine, theirs))  # they are made in another way
    for x, y in zip(mine, theirs):
        assert (x.float() - y.float()).norm() <= 6e-3 * y.float().norm() + 1e-6
