"""Kimi's delta rule with bounded gates, of few long sequences, in segments: against float64 and the same launch of
whole sequences."""
import pytest
import torch

import tkq
from tests.gpu.linear_attention.test_bounded import OPTIONS, K, exact, make
from tests.helpers.bounded_reach import reach
from tests.helpers.sanitizer.nan_fill import poisoned
from tkq.linear_attention.channels.bounded import launch as bounded
from tkq.linear_attention.channels.bounded.launch import BoundedGiven, in_segments, reach_of
from tkq.linear_attention.channels.decays import numbers
from tkq.linear_attention.config import ALL
from tkq.testing import assert_2x

SCALE, BOUND = K**-0.5, -5.0


def edge_of(S, count):
    """The first token of the second of `count` segments."""
    chunks = (S + 63) // 64
    return 64 * ((chunks + count - 1) // count)


def of_all_kinds(S, B=2):
    """Heads whose state is forgotten in two or three chunks, in three or four, never, and never in one column."""
    given = make(S, B=B)
    bias = 0.1 * given["dt_bias"]
    bias[1], bias[2], bias[3, 5] = bias[1] - 1.0, -100.0, -100.0
    return given | dict(A_log=torch.zeros_like(given["A_log"]), dt_bias=bias)


def launched(given, initial=None):
    """What a launch takes."""
    first = [given[name] for name in ("q", "k", "v", "g", "beta")]
    return BoundedGiven(*first, *numbers(given["g"], given["A_log"], given["dt_bias"]), BOUND, initial, True)


@pytest.mark.parametrize("S, count", [(3000, 4), (1100, 2)])
def test_chunks_that_reach_a_segment(S, count):
    """Against float64, but where a bound is within rounding. A beta above 2 makes states larger; NaN is no bound."""
    given = of_all_kinds(S)
    given["beta"][1] = 4.0
    edge = edge_of(S, count)
    given["g"][0, edge - 64:edge, 0], given["g"][0, edge:edge + 64, 1] = -100.0, -100.0  # which counts, which does not
    with poisoned():
        found = reach_of(launched(given), count)
    of_gates = (given[name] for name in ("k", "g", "beta", "A_log", "dt_bias"))
    want, near = reach(*of_gates, BOUND, count)
    clear = near > 0.1
    assert clear.float().mean() > 0.8 and torch.equal(found[clear], want[clear])
    assert (want[:, :, :2] <= 4).any() and (want[:, :, 2:] == ALL).all()
    given["k"][0, edge - 20, 0] = float("nan")  # of heads 0 and 1
    again = reach_of(launched(given), count)
    found[0, 0, :2] = ALL
    assert torch.equal(again, found)


@pytest.mark.parametrize("S", [1535, 1537, pytest.param(1536, marks=pytest.mark.slow)])
def test_segments(S):
    """Three of them. Heads, and sequences, do not decide for each other: one keeps its state at the first edge alone,
    one at the second alone. What begins with its sequence has the bits of a whole one."""
    given, initial = of_all_kinds(S), torch.randn(2, 4, K, 128, device="cuda")
    edge = edge_of(S, 3)
    given["g"][1, edge // 2:edge, 0] = -100.0
    given["g"][1, edge:2 * edge, 1] = -100.0
    launch = launched(given, initial)
    ends = reach_of(launch, 3) == ALL
    assert ends[0].tolist() == [[False, False, True, True]] * 2
    assert ends[1].tolist() == [[True, False, True, True], [False, True, True, True]]
    want, _ = exact(given, BOUND, initial)
    whole = in_segments(launch, SCALE, 1)
    with poisoned():
        mine = in_segments(launch, SCALE, 3)
    for name, a, b, c in zip(("o", "state"), mine, want, whole):
        assert_2x(a.flatten(0, -2), b.flatten(0, -2), c.flatten(0, -2), what=name)
        assert torch.equal(a[:, :, 2:] if name == "o" else a[:, 2:], c[:, :, 2:] if name == "o" else c[:, 2:])
    for first in (edge, 2 * edge):  # where a state that is not there would show
        a, b, c = (x[:, first:first + 64].flatten(0, -2) for x in (mine[0], want[0], whole[0]))
        assert_2x(a, b, c, what=f"o behind {first}")
    assert torch.equal(mine[0][:, :edge], whole[0][:, :edge])
    assert torch.equal(mine[0][1, :2 * edge, 0], whole[0][1, :2 * edge, 0])
    again = in_segments(launch, SCALE, 3)
    assert torch.equal(again[0], mine[0]) and torch.equal(again[1], mine[1])


def test_nan_ends_where_decays_end():
    """In a value of the second chunk: it reaches the chunk, and all behind it in heads that do not forget; in others it
    stays in its segment."""
    given, initial = of_all_kinds(1536, 1), torch.zeros(1, 4, K, 128, device="cuda")
    clean = in_segments(launched(given, initial), SCALE, 3)
    given["v"][:, 100] = float("nan")
    o, state = in_segments(launched(given, initial), SCALE, 3)
    assert torch.equal(o[:, 512:, :2], clean[0][:, 512:, :2]) and torch.equal(state[:, :2], clean[1][:, :2])
    assert torch.equal(o[:, :64], clean[0][:, :64])
    assert o[:, 128:, 2].isnan().all() and state[:, 2].isnan().all()


def test_a_call_of_one_long_sequence(monkeypatch):
    """As a program makes it: in segments, with the results of float64."""
    seen, run = [], bounded.in_segments
    monkeypatch.setattr(bounded, "in_segments", lambda *given: seen.append(given[2]) or run(*given))
    given, initial = of_all_kinds(2048, 1), torch.randn(1, 4, K, 128, device="cuda")
    with poisoned():
        o, state = tkq.gated_delta_rule(**given, initial_state=initial, output_final_state=True, gate_lower_bound=BOUND,
                                        **OPTIONS)
    assert seen == [4]
    want, _ = exact(given, BOUND, initial)
    for name, a, b, c in zip(("o", "state"), (o, state), want, run(launched(given, initial), SCALE, 1)):
        assert_2x(a.flatten(0, -2), b.flatten(0, -2), c.flatten(0, -2), what=name)
    v_first = tkq.gated_delta_rule(**given, initial_state=initial.mT.contiguous(), output_final_state=True,
                                   gate_lower_bound=BOUND, state_v_first=True, **OPTIONS)
    assert torch.equal(v_first[0], o) and torch.equal(v_first[1], state.mT)
