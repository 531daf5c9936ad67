"""The delta rule's forward of few long sequences, in segments whose blocks begin where gates let them: against float64
and the same launch of whole sequences."""
import math

import pytest
import torch

import tkq
from tests.gpu.linear_attention.test_split import beta_of, of_all_kinds, state_of, wide
from tests.helpers.linear_launches import launched
from tests.helpers.one_sign import bias_of_one_sign
from tests.helpers.sanitizer.nan_fill import poisoned
from tkq.linear_attention import launch as engine
from tkq.linear_attention.config import ALL
from tkq.linear_attention.launch import Given
from tkq.linear_attention.split import launch as split_launch
from tkq.linear_attention.split.launch import in_overlapping_segments, reach_of
from tkq.runtime.device import arch
from tkq.testing import assert_2x

F32 = torch.float32
KEEPS, SOME, FORGETS, RESETS = range(4)  # heads of `of_all_kinds`


def check(made, given, scale):
    """Against float64, beside a launch of whole sequences in plain PyTorch, rounded as the kernel rounds."""
    exact, peer = launched(wide(given), scale), launched(given, scale)
    ulps = 1 + given.q.shape[1] / 16
    assert_2x(made.o, exact.o, peer.o, what="o")
    rows = [x.state.flatten(0, -2) for x in (made, exact, peer)]
    assert_2x(*rows, ulps=ulps, bias_ulps=bias_of_one_sign(*rows[1:], ulps), what="state")
    return exact, peer


@pytest.mark.parametrize("S, count, K, V, dtype", [
    (2000, 3, 128, 128, "bfloat16"), (1537, 2, 64, 80, "float16"),
    pytest.param(4095, 7, 128, 176, "bfloat16", marks=pytest.mark.slow)])
def test_segments(S, count, K, V, dtype):
    """Heads do not decide for each other, nor segments. What begins with its sequence has the bits of a whole one."""
    q, k, v, g, beta = of_all_kinds(2, S, 4, K, V)
    g[..., RESETS] *= 0.02
    g[:, S // 2:S // 2 + 2, RESETS] = -120.0  # two of them leave nothing: the segment behind begins there
    q, k, v = (x.to(getattr(torch, dtype)) for x in (q, k, v))
    given = Given(q, k, v, g, beta, state_of(v, K, F32 if dtype == "bfloat16" else torch.bfloat16), F32)
    ends = (reach_of(given._replace(segments=count), 1)[0] == ALL).view(2, count, 4)
    assert ends[..., KEEPS].all() and not ends[:, :-1, FORGETS].any()
    whole = engine.launch(given, 0.1)
    with poisoned():
        made = in_overlapping_segments(given, 0.1, count)
    exact, peer = check(made, given, 0.1)
    assert torch.equal(made.o[:, :, KEEPS], whole.o[:, :, KEEPS])
    assert torch.equal(made.state[:, KEEPS], whole.state[:, KEEPS])
    edge = 64 * math.ceil(math.ceil(S / 64) / count)
    assert torch.equal(made.o[:, :edge], whole.o[:, :edge])
    for first in range(edge, S - 64, edge):  # where a state that is not there would show
        assert_2x(*(x.o[:, first:first + 64] for x in (made, exact, peer)), what=f"o behind {first}")
    again = in_overlapping_segments(given, 0.1, count)
    assert torch.equal(again.o, made.o) and torch.equal(again.state, made.state)


def test_without_states():
    q, k, v, g, beta = of_all_kinds(1, 1100, 4, 128, 128)
    with poisoned():
        made = in_overlapping_segments(Given(q, k, v, g, beta), 0.1, 2)
    with_state = in_overlapping_segments(Given(q, k, v, g, beta, torch.zeros_like(state_of(v, 128)), F32), 0.1, 2)
    assert made.state is None and torch.equal(made.o, with_state.o)


@pytest.mark.parametrize("where", ["value", "state"])
def test_nan_ends_where_decays_end(where):
    """In a value of the second chunk, or in the first state: it reaches all behind it in a head that forgets nothing;
    in others it stays in its segment. NaN behind the end of each tensor is not read."""
    q, k, v, g, beta = of_all_kinds(1, 1500, 4, 128, 128)
    initial = state_of(v, 128)
    clean = in_overlapping_segments(Given(q, k, v, g, beta, initial, F32), 0.1, 3)
    held = [torch.full((1, 1600, *x.shape[2:]), math.nan, device="cuda", dtype=x.dtype) for x in (q, k, v, g, beta)]
    for x, y in zip(held, (q, k, v, g, beta)):
        x[:, :1500] = y
    q, k, v, g, beta = (x[:, :1500] for x in held)
    if where == "value":
        v[:, 100] = math.nan
    else:
        initial = torch.full_like(initial, math.nan)
    made = in_overlapping_segments(Given(q, k, v, g, beta, initial, F32), 0.1, 3)
    assert torch.equal(made.o[:, 512:, FORGETS], clean.o[:, 512:, FORGETS])
    assert torch.equal(made.state[:, FORGETS], clean.state[:, FORGETS])
    assert made.o[:, 128:, KEEPS].isnan().all() and made.state[:, KEEPS].isnan().all()


def test_a_call_of_two_long_sequences(monkeypatch):
    """As a program makes it: in segments, with the results of float64, in a graph, too; bfloat16 beta."""
    assert arch.num_sms(torch.device("cuda")) >= 128
    seen, run = [], split_launch.in_overlapping_segments
    monkeypatch.setattr(split_launch, "in_overlapping_segments", lambda *given: seen.append(given[2]) or run(*given))
    q, k, v, g, beta = of_all_kinds(2, 2560, 32, 128, 128)
    initial, beta = state_of(v, 128), beta_of(v).bfloat16()
    with torch.no_grad(), poisoned():
        o, state = tkq.gated_delta_rule(q, k, v, g, beta, initial_state=initial, output_final_state=True)
    assert seen == [2]
    few = [x[:, :, :4 * x.shape[2] // 32] for x in (q, k, v, g, beta)]
    check(split_launch.Made(o[:, :, :4], state[:, :4], None), Given(*few, initial[:, :4], F32), 128**-0.5)
    v_first = tkq.gated_delta_rule(q, k, v, g, beta, initial_state=initial.mT.contiguous(), output_final_state=True,
                                   state_v_first=True)
    assert seen == [2, 2] and torch.equal(v_first[0], o) and torch.equal(v_first[1], state.mT)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = tkq.gated_delta_rule(q, k, v, g, beta, initial_state=initial, output_final_state=True)
    graph.replay()
    assert torch.equal(replayed[0], o) and torch.equal(replayed[1], state)
