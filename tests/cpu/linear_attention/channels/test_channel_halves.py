"""More columns of k with gates of their own than a launch takes: halves of them, exactly in float64."""
import pytest
import torch

from tests.helpers.channel_launches import launched
from tkq.linear_attention.channels import gradients, halves
from tkq.linear_attention.channels.launch import ChannelGiven
from tkq.linear_attention.gradients import Needs, Saved
from tkq.reference.linear_attention import linear_attn, linear_attn_backward


@pytest.mark.parametrize("K", [144, 256])
@pytest.mark.parametrize("states", [False, True])
def test_of_halves(monkeypatch, K, states):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 9, 1, K).double(), torch.randn(2, 9, 1, K).double(), torch.randn(2, 9, 2, 32).double()
    g, do, scale = -torch.rand(2, 9, 2, K).double(), torch.randn_like(v), K**-0.5
    initial, dfinal = (torch.randn(2, 2, K, 32).double() if states else None for _ in range(2))
    for module in (halves, gradients):
        monkeypatch.setattr(module, "launch", launched)
    final = torch.float64 if states else None
    for v_first in (False, True):
        o, state = halves.forward(ChannelGiven(q, k, v, g, None, initial, final, v_first=v_first), scale)
        want, last = linear_attn(q, k, v, g, scale, initial)
        torch.testing.assert_close(o, want)
        assert state is None if not states else (state.mT if v_first else state).is_contiguous()
        if states:
            torch.testing.assert_close(state, last)
    found = halves.backward(Saved(q, k, v, g, initial), scale, do, dfinal)
    for mine, exact in zip(found, linear_attn_backward(do, dfinal, q, k, v, g, initial, scale)):
        assert (mine is None) == (exact is None)
        if mine is not None:
            torch.testing.assert_close(mine, exact)
    found = halves.backward(Saved(q, k, v, g, initial), scale, do, dfinal, Needs(False, True, False, False, False))
    assert [x is None for x in found] == [True, False, True, True, True]
    assert [part.stop - (part.start or 0) for part in halves.halves(144)] == [80, 64]
