"""The launches that the delta rule's gradients are made of, one by one, against the same in float64: tokens that do not
see themselves, corrected values, their gradients. Beside the same in plain PyTorch, rounded as the kernel rounds."""
import pytest
import torch
from torch.nn.functional import normalize

from tests.gpu.linear_attention.test_linear_forward import make
from tests.helpers.linear_launches import launched, of_gradients
from tests.helpers.sanitizer.guard_pages import guarded
from tests.helpers.sanitizer.nan_fill import poisoned
from tkq.linear_attention.launch import Given, launch
from tkq.testing import assert_2x


def check(given, scale=0.3):
    with poisoned():
        found = launch(given, scale)
    peer = launched(given, scale)
    exact = launched(given._replace(**{name: None if x is None else x.double() for name, x in given._asdict().items()
                                       if x is None or isinstance(x, torch.Tensor)}), scale)
    room = 1 + given.q.shape[1] / 16  # tensor cores cut off what they add to a sum of fp32
    assert_2x(found.o, exact.o, peer.o, what="o")
    if peer.dv is not None:
        assert_2x(found.dv, exact.dv, peer.dv, what="dv")
    if peer.inverse is not None and not given.blocks:
        assert_2x(*(x.flatten(0, -2) for x in (found.inverse, exact.inverse, peer.inverse)), what="inverse")
    for what, mine, want, other in zip(("state", "dots"), found[1:], exact[1:], peer[1:]):
        if want is not None:
            assert_2x(*(x.flatten(0, -2) for x in (mine, want, other)), ulps=room, bias_ulps=room, what=what)
    return found


def beta_of(v, dtype=torch.float32):
    return torch.rand(v.shape[:3], device="cuda").to(dtype)


def some_small(x):
    """Betas of heads as x has them, of which the forward keeps what values lack, too: one below 0, zeros."""
    beta = beta_of(x)
    beta[:, ::3] *= 0.1
    beta[:, ::7], beta[:, 1::7] = 0.0, -0.05
    return beta


def states(q, v):
    return torch.randn(len(q), max(q.shape[2], v.shape[2]), q.shape[3], v.shape[3], device="cuda")


@pytest.mark.parametrize("S", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("gate", ["none", "token"])
@pytest.mark.sampled(when=lambda gate, reverse: (gate == "token") == reverse)
def test_tokens_that_do_not_see_themselves(S, reverse, gate):
    q, k, v, g = make(2, S, 2, 4, 64, 64, gate)
    check(Given(q, k, v, g, initial=states(q, v), strict=True, reverse=reverse))


@pytest.mark.parametrize("S", [1, 65, 200])
@pytest.mark.parametrize("reverse", [False, True])
def test_sums_of_those(S, reverse):
    q, k, v, g = make(2, S, 2, 4, 64, 64, "token")
    check(Given(q, k, v, g, initial=states(q, v), x=torch.randn_like(v), strict=True, reverse=reverse))


@pytest.mark.parametrize("gate, sums", [("none", False), ("token", True)])
@pytest.mark.parametrize("S", [1, 64, 65, 200])
@pytest.mark.parametrize("second", ["query", "pair"])
@pytest.mark.sampled(when=lambda gate, second, S: gate == "token" or (second, S) == ("pair", 200))
def test_second_operands(S, gate, sums, second):
    """As the gradients have them: dq and w, x - y; each by itself, in float64."""
    v, v2, q, g = make(2, S, 2, 4, 64, 64, gate)  # heads share values
    k, more = torch.randn_like(q), torch.randn_like(q)
    given = Given(q, k, v, g, initial=torch.randn(2, 4, 64, 64, device="cuda"), x=torch.randn_like(v) if sums else None,
                  kept=some_small(q))
    if second == "query":
        check(given._replace(q2=more, final=torch.float32))
    else:
        check(given._replace(k2=more, v2=v2, x=v2 if sums else None, reverse=True))


def neighbours(second, packed):
    """Four heads, of which two share values, of 96 columns: what one warpgroup of the state writes, and a part of what
    the other does."""
    v, v2, q, g = make(1 if packed else 2, 300, 2, 4, 96, 64, "token")
    more, other = torch.randn_like(q), torch.randn_like(v)
    cu = torch.tensor([0, 70, 70, 199, 300], device="cuda", dtype=torch.int32) if packed else None
    given = Given(q, torch.randn_like(q), v, g, initial=torch.randn(4 if packed else 2, 4, 64, 96, device="cuda"),
                  cu=cu, summed=True, kept=some_small(q))
    if second == "query":
        return given._replace(q2=more, x=other, final=torch.float32)
    return given._replace(k2=more, v2=v2, x=v2, reverse=True, less=other)


@pytest.mark.parametrize("second, packed", [("query", False), ("pair", False), ("query", True), ("pair", True)])
@pytest.mark.sampled(when=lambda second, packed: (second == "pair") == packed)
def test_outputs_of_neighbours(second, packed):
    """Of two heads each, which a cluster of blocks adds up: the same bits each time."""
    given = neighbours(second, packed)
    found = check(given)
    assert found.o.shape[2] == 2 and (found.dv is None or found.dv.shape[2] == 2)
    for _ in range(3):
        again = launch(given, 0.3)
        assert all(torch.equal(x, y) for x, y in zip(found, again) if x is not None)


@pytest.mark.parametrize("sums", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_what_is_taken_off(sums):
    """Or, with sums, added; of each head by itself."""
    v, v2, q, g = make(2, 200, 2, 4, 64, 64, "token")
    check(Given(q, torch.randn_like(q), v, g, k2=torch.randn_like(q), v2=v2, x=v2 if sums else None, reverse=True,
                kept=some_small(q), less=torch.randn(2, 200, 4, 64, device="cuda").to(v.dtype)))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("gate", ["none", "token"])
@pytest.mark.parametrize("S", [1, 63, 64, 65, 300])
@pytest.mark.sampled(when=lambda gate: gate == "token")
def test_updates_and_their_gradients(reverse, gate, S):
    q, k, v, g = make(2, S, 2, 4, 128, 128, gate)
    check(of_gradients(Given(q, k, v, g, some_small(v), states(q, v), torch.float32), reverse))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("K, V, dtype", [(32, 32, torch.float32), (64, 128, torch.bfloat16), (96, 80, torch.float32),
                                         (128, 256, torch.float32)])
@pytest.mark.sampled(when=lambda reverse, K: reverse == (K == 96) and K in (96, 128))
def test_widths(reverse, K, V, dtype):
    q, k, v, g = make(1, 130, 2, 2, K, V, "token")
    check(of_gradients(Given(q, k, v, g, beta_of(v, dtype), states(q, v), torch.float32), reverse))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("keys", ["random", "identical", "correlated"])
@pytest.mark.parametrize("decay", [0.1, 20.0])
def test_hard_inverses(reverse, beta, keys, decay):
    q, k, v, g = make(1, 256, 2, 2, 64, 64, "token", decay=decay)
    if keys == "identical":
        k = k[:, :1].expand_as(k).contiguous()
    elif keys == "correlated":
        k = normalize(k[:, :1].float() + 0.3 * torch.randn(k.shape, device="cuda") / 8, dim=-1).to(k.dtype)
    given = Given(q, k, v, g, torch.full(v.shape[:3], beta, device="cuda"), None, torch.float32)
    check(of_gradients(given, reverse))


def test_nothing_in_front_of_the_first_token_counts():
    """Reversed, beta and gates of chunks that there are not."""
    q, k, v, g = make(1, 100, 2, 2, 64, 64, "token")
    beta = beta_of(v)
    def behind(x):
        wide = torch.full((1, 300, *x.shape[2:]), torch.nan, device="cuda", dtype=x.dtype)
        wide[:, 100:200] = x
        return wide[:, 100:200]
    given = of_gradients(Given(q, k, v, g, beta, final=torch.float32), True)
    found = launch(given, 0.125)
    again = launch(given._replace(**{name: behind(getattr(given, name)) for name in (
        "q", "k", "v", "g", "beta", "x", "inverse")}), 0.125)
    assert torch.equal(found.o, again.o) and torch.equal(found.state, again.state)
    assert torch.equal(found.dots, again.dots)


@pytest.mark.parametrize("where", ["front", "end"])
def test_nothing_in_front_of_gates_is_read(where):
    """Nor behind them, either way: memory is mapped where they are alone."""
    q, k, v, g = make(1, 100, 2, 2, 64, 64, "token")
    forward = Given(q, k, v, guarded(g, where), guarded(beta_of(v), where), final=torch.float32)
    for reverse in (False, True):
        launch(of_gradients(forward, reverse), 0.125)
    torch.cuda.synchronize()
