"""Gradients of final states near the end of fp16's range, where no GPU is needed: launches in plain PyTorch, rounded as
the kernels round, against float64. Divided by the scale they would be infinite."""
import math

import pytest
import torch
from torch.nn.functional import normalize

from tests.helpers import channel_launches, linear_launches
from tkq.linear_attention import gradients
from tkq.linear_attention.channels import gradients as channel_gradients
from tkq.linear_attention.delta import channel_gradients as channel_delta_gradients
from tkq.linear_attention.delta import gradients as delta_gradients
from tkq.linear_attention.gradients import SMALLEST, behind_last
from tkq.reference.linear_attention import gated_delta_rule_backward, linear_attn_backward

FP16, MOST = torch.float16, torch.finfo(torch.float16).max
FAMILIES = {("token", False): gradients, ("token", True): delta_gradients, ("column", False): channel_gradients,
            ("column", True): channel_delta_gradients}


@pytest.mark.parametrize("gate, delta", FAMILIES)
def test_they_stay_finite(monkeypatch, gate, delta):
    """Gradients of 10,000 with a scale of 1 / sqrt(128), beside outputs' gradients of usual size."""
    torch.manual_seed(0)
    module, K, V = FAMILIES[gate, delta], 32, 32
    monkeypatch.setattr(module, "launch", (linear_launches if gate == "token" else channel_launches).launched)
    if gate == "column":
        monkeypatch.setattr(channel_gradients, "launch", channel_launches.launched)
    q, k = (normalize(torch.randn(1, 100, 2, K), dim=-1).to(FP16) for _ in range(2))
    v, do = (torch.randn(2, 1, 100, 2, V) / 16).to(FP16)
    g = -0.05 * torch.rand(1, 100, 2, *(K,) * (gate == "column"))
    given = q, k, v, g, *(torch.rand(1, 100, 2),) * delta, torch.randn(1, 2, K, V) / 16
    dfinal, scale = 1e4 * torch.randn(1, 2, K, V).sign(), 128**-0.5
    assert dfinal.max() < MOST < dfinal.max() / scale
    saved = delta_gradients.DeltaSaved if delta else gradients.Saved
    reference = gated_delta_rule_backward if delta else linear_attn_backward
    wide = [x.double() for x in given]
    for mine, exact in zip(module.backward(saved(*given), scale, do, dfinal),
                           reference(do.double(), dfinal.double(), *wide, scale, None)):
        assert mine.isfinite().all()
        assert (mine.double() - exact).norm() < 4e-3 * exact.norm()


@pytest.mark.parametrize("scale", [128**-0.5, -0.3, 1.0, 7.0, 2.0**-6, 1e-5])
def test_what_a_launch_multiplies_is_the_same(scale):
    q, dfinal = torch.randn(1, 9, 2, 32).to(FP16), torch.randn(1, 2, 32, 32)
    behind = behind_last(q, scale, dfinal)
    unit = scale / behind.scale
    assert math.frexp(unit)[0] == 0.5 and SMALLEST <= unit <= 1.0  # exact, and no overflow
    assert torch.equal(behind.q, q * unit) and torch.equal(behind.state, dfinal / behind.scale)
    assert abs(behind.scale) >= min(abs(scale) / SMALLEST, 1.0)


def test_others_are_as_they_came():
    q, dfinal = torch.randn(1, 9, 2, 32).bfloat16(), torch.randn(1, 2, 32, 32)
    behind = behind_last(q, 0.3, dfinal)
    assert behind.q is q and behind.scale == 0.3 and torch.equal(behind.state, dfinal / 0.3)
    assert behind_last(q.to(FP16), 0.3, None)[1:] == (0.3, None)
