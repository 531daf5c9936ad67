"""The gated delta rule's gradients, where no GPU is needed: made of the engine's launches in float64, chunk by chunk,
against autograd of the recurrence, on the cases that break kernels."""
import pytest
import torch
from torch.nn.functional import normalize

from tests.helpers.linear_launches import launched
from tests.helpers.linear_segments import from_starts, in_segments
from tkq.linear_attention.delta import gradients as delta_gradients
from tkq.linear_attention.delta.gradients import ALL, DeltaNeeds, DeltaSaved, backward
from tkq.linear_attention.launch import Given
from tkq.reference.linear_attention import gated_delta_rule_backward
from tkq.reference.linear_attention import linear_attn as recurrence

KEYS = {"random": lambda k: k, "identical": lambda k: k[:, :1].expand_as(k),
        "correlated": lambda k: normalize(k[:, :1] + 0.3 * k, dim=-1)}


def make(S=130, K=32, V=48, decay=0.1, keys="random", beta=None, states=True, heads=2):
    """q, k, v, g, beta, initial state; four heads of v share `heads` of q and k."""
    torch.manual_seed(0)
    q, k = (normalize(torch.randn(2, S, heads, K, dtype=torch.float64), dim=-1) for _ in range(2))
    v = torch.randn(2, S, 4, V, dtype=torch.float64)
    g = None if decay is None else -decay * torch.rand(2, S, 4, dtype=torch.float64)
    b = torch.rand(2, S, 4, dtype=torch.float64) if beta is None else torch.full((2, S, 4), beta, dtype=torch.float64)
    return q, KEYS[keys](k), v, g, b, torch.randn(2, 4, K, V, dtype=torch.float64) if states else None


def by_autograd(q, k, v, g, beta, initial, scale, do, dstate):  # noqa: PLR0913
    leaves = [None if x is None else x.clone().requires_grad_() for x in (q, k, v, g, beta, initial)]
    q, k, v, g, beta, initial = leaves
    results = recurrence(q, k, v, g, scale, initial, beta=beta)
    pairs = [(y, dy) for y, dy in zip(results, (do, dstate)) if dy is not None]
    found = iter(torch.autograd.grad([y for y, _ in pairs], [x for x in leaves if x is not None],
                                     [dy for _, dy in pairs]))
    return [None if x is None else next(found) for x in leaves]


def check(given, scale=0.3, needs=ALL, of_state=True):
    do, dstate = torch.randn_like(given[2]), torch.randn(2, 4, given[0].shape[3], given[2].shape[3]).double()
    dstate = dstate if of_state else None
    want = by_autograd(*given, scale, do, dstate)
    for mine, exact, needed in zip(backward(DeltaSaved(*given), scale, do, dstate, needs), want, needs):
        assert (mine is None) == (exact is None or not needed)
        if mine is not None:
            torch.testing.assert_close(mine, exact, rtol=1e-9, atol=1e-9 * exact.abs().max().item())
    return want, (do, dstate)


@pytest.fixture(autouse=True)
def exactly(monkeypatch):
    monkeypatch.setattr(delta_gradients, "launch", launched)


@pytest.mark.parametrize("S", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("decay", [None, 0.1])
def test_lengths(S, decay):
    check(make(S, decay=decay))


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("decay", [0.0, 0.1, 20.0])
@pytest.mark.sampled(when=lambda keys, beta, decay: (keys == "identical") == (beta == 2.0) and decay != 20.0)
def test_hard_inverses(keys, beta, decay):
    check(make(keys=keys, beta=beta, decay=decay))


@pytest.mark.parametrize("heads, summed", [(1, True), (2, True), (4, False)])
def test_heads_that_share_wide_keys(monkeypatch, heads, summed):
    """The launches add up two neighbours, in each part of the values."""
    found = []

    def noted(given, scale):
        found.append(given.summed)
        return launched(given, scale)

    monkeypatch.setattr(delta_gradients, "launch", noted)
    check(make(70, K=80, V=144, heads=heads))
    assert found.count(True) == 4 * summed


@pytest.mark.parametrize("columns", [80, 64])
def test_parts_of_values_are_summed_alike(monkeypatch, columns):
    """Where the launch of one part alone is one that would add up neighbours."""
    monkeypatch.setattr(delta_gradients, "sums_neighbours", lambda given: given.q.shape[3] == columns)
    check(make(70, K=80, V=144))


def test_a_reset():
    given = make(200)
    given[3][:, ::37] = -60.0
    check(given)


@pytest.mark.parametrize("scale", [-2.0, 0.0])
def test_scales(scale):
    check(make(70), scale)


def test_without_states():
    check(make(states=False), of_state=False)


def test_more_values_than_an_operand_in_the_place_of_keys():
    check(make(70, V=144))


@pytest.mark.parametrize("i", range(6))
def test_one_gradient(i):
    check(make(70), needs=DeltaNeeds(*(i == j for j in range(6))))


@pytest.mark.parametrize("decay", [None, 0.1])
def test_the_reference_of_the_gradients(decay):
    given = make(7, decay=decay)
    want, (do, dstate) = check(given)
    for mine, exact in zip(gated_delta_rule_backward(do, dstate, *given, 0.3), want):
        assert mine is exact is None or torch.allclose(mine, exact)


@pytest.mark.parametrize("keys, beta", [("random", None), ("correlated", 1.0), ("random", 2.0)])
@pytest.mark.parametrize("decay", [0.1, 20.0])
def test_16_bits_are_enough(keys, beta, decay):
    """The launches rounded as the kernels round them: errors are those of a few roundings to 8 bits."""
    q, k, v, g, b, initial = make(200, 32, 48, decay, keys, beta)
    q, k, v = (x.to(torch.bfloat16) for x in (q, k, v))
    g, b, initial = (x.float() for x in (g, b, initial))
    do, dstate = torch.randn_like(v), torch.randn_like(initial)
    found = backward(DeltaSaved(q, k, v, g, b, initial), 0.3, do, dstate)
    want = gated_delta_rule_backward(do.double(), dstate.double(), q.double(), k.double(), v.double(), g, b, initial,
                                     0.3)
    for name, mine, exact in zip(DeltaSaved._fields, found, want):
        assert (mine.double() - exact).norm() < 2**-6 * exact.norm(), name


# ---- of segments ----------------------------------------------------------------------------------------------------


def segmented(count):
    """A launch, and what a forward keeps: the delta rule's in segments, others where they get what these begin with."""
    def launch(given, scale):
        if given.starts is not None:
            return from_starts(given, scale)
        return in_segments(given, scale, count) if given.beta is not None else launched(given, scale)

    return launch


def kept_by(given, scale, count, final):
    """What a forward in so many segments keeps."""
    made = in_segments(Given(*given[:6], torch.float32 if final else None, updates=True), scale, count)
    return DeltaSaved(*given, None, made.dv, made.inverse, given[0].new_zeros(2 * count), made.starts)


@pytest.mark.parametrize("S, count", [(256, 2), (300, 3), (130, 2)])
@pytest.mark.parametrize("of_state", [False, True])
def test_states_of_segments_are_made_once(monkeypatch, S, count, of_state):
    """The forward's and those of dV serve the other launches, and gates' sums end with a segment."""
    seen = []

    def launch(given, scale):
        seen.append(given)
        return segmented(count)(given, scale)

    monkeypatch.setattr(delta_gradients, "launch", launch)
    given, scale = make(S, V=144 if S == 130 else 48), 0.3
    do = torch.randn_like(given[2])
    dstate = torch.randn_like(given[5]) if of_state else None
    found = backward(kept_by(given, scale, count, of_state), scale, do, dstate)
    assert all(one.starts is not None and len(one.starts) == 2 * count for one in seen[1:]) and len(seen) > 2
    for mine, exact in zip(found, by_autograd(*given, scale, do, dstate)):
        torch.testing.assert_close(mine, exact, rtol=1e-9, atol=1e-9 * exact.abs().max().item())


@pytest.mark.parametrize("decay, keys, beta", [(0.1, "random", None), (0.0, "random", None), (0.0, "identical", 1.0),
                                               (0.02, "correlated", 2.0)])
def test_gradients_in_segments_are_as_exact(monkeypatch, decay, keys, beta):
    """Rounded as the kernels round: beside those of whole sequences."""
    given, scale, count = make(768, 64, 64, decay, keys, beta, states=False), 0.125, 4
    given = *(x.to(torch.bfloat16) for x in given[:3]), *(x.float() for x in given[3:5]), None
    do = torch.randn_like(given[2])
    wide = [x if x is None else x.double() for x in given]
    want = gated_delta_rule_backward(do.double(), None, *wide, scale)
    whole = backward(DeltaSaved(*given), scale, do)
    monkeypatch.setattr(delta_gradients, "launch", segmented(count))
    mine = backward(kept_by(given, scale, count, False), scale, do)
    for name, x, y, exact in zip(DeltaSaved._fields, mine, whole, want):
        if exact is not None:
            error, usual = ((z.double() - exact).norm() / exact.norm() for z in (x, y))
            assert error < (1.25 if name == "g" else 1.05) * usual, (name, error, usual)
