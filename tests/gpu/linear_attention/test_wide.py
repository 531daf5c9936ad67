"""K above 128: a state that one warpgroup rounds piece by piece. Launches against the recurrences in float64, beside
the same in plain PyTorch, rounded as the kernel rounds."""
import pytest
import torch

import tkq
from tests.gpu.linear_attention import (
    test_delta_forward,
    test_delta_launches,
    test_linear_forward,
    test_packed,
    test_ssd_forward,
)
from tests.gpu.linear_attention.test_linear_forward import make
from tests.helpers.linear_launches import launched, of_gradients
from tests.helpers.sanitizer.nan_fill import poisoned
from tkq.linear_attention.launch import Given, launch
from tkq.testing import assert_2x

F32 = torch.float32


@pytest.mark.parametrize("S, decay", [(1, 0.1), (65, 0.1), (200, 0.1), (200, 20.0)])
def test_forward(S, decay):
    test_linear_forward.check(*make(2, S, 1, 2, 256, 64, "token", decay=decay))


def test_the_same_bits_and_heads_by_themselves():
    q, k, v, g = make(2, 300, 2, 4, 256, 64, "token")
    o, state = tkq.linear_attn(q, k, v, g, output_final_state=True)
    again, _ = tkq.linear_attn(q, k, v, g, output_final_state=True)
    alone, of_one = tkq.linear_attn(q[:1, :, 1:], k[:1, :, 1:], v[:1, :, 3:], g[:1, :, 3:], output_final_state=True)
    assert torch.equal(o, again) and torch.equal(o[:1, :, 3:], alone) and torch.equal(state[:1, 3:], of_one)


def delta_rule(S, keys):
    """96 columns of V are one and a half tiles."""
    q, k, v, g = make(1, S, 1, 2, 256, 96, "token")
    k = k[:, :1].expand_as(k).contiguous() if keys == "identical" else k
    beta = 2.0 * torch.ones(1, S, 2, device="cuda") if keys == "identical" else torch.rand(1, S, 2, device="cuda")
    return test_delta_forward.check(q, k, v, g, beta, torch.randn(1, 2, 256, 96, device="cuda"))


@pytest.mark.parametrize("keys", ["random", "identical"])
@pytest.mark.parametrize("S", [1, 200])
def test_delta_rule(S, keys):
    delta_rule(S, keys)


def test_delta_rule_without_gates():
    """Of 144 columns, the last piece of which is smaller."""
    q, k, v, _ = make(1, 150, 1, 2, 144, 64, "none")
    test_delta_forward.check(q, k, v, None, torch.rand(1, 150, 2, device="cuda"))


@pytest.mark.parametrize("S", [65, 200])
def test_updates(S):
    q, k, v, g = make(1, S, 1, 2, 256, 64, "token")
    test_delta_launches.check(of_gradients(Given(
        q, k, v, g, test_delta_launches.beta_of(v), test_delta_launches.states(q, v)), False))


def test_gradients_of_updates_of_packed_sequences():
    q, k, v, g, beta, initial = test_packed.tensors_of("gated_delta_rule", "token", 256, 64)
    test_packed.check_launch(of_gradients(Given(q, k, v, g, beta, initial, F32, cu=test_packed.cu_of()), True))


@pytest.mark.parametrize("S", [1, 65, 200])
def test_gradients_of_values_and_sums(S):
    """Operands in two parts."""
    q, k, v, g = make(1, S, 1, 2, 256, 64, "token")
    test_delta_launches.check(Given(k, q, torch.randn_like(v), g, initial=test_delta_launches.states(q, v), final=F32,
                                    x=v, reverse=True))


def test_ssd():
    test_ssd_forward.check(test_ssd_forward.make(1, 130, N=256, without=()))


def test_gradients_of_ssd():
    """x's, D's, and sums for dt's."""
    saved = test_ssd_forward.make(1, 130, N=256, without=("z",))
    steps = saved.steps._replace(skip=saved.D, skip_gradient=True)
    given = Given(saved.B, saved.C, torch.randn_like(saved.x), initial=torch.randn_like(saved.initial), final=F32,
                  x=saved.x, reverse=True, steps=steps, state_v_first=True)
    with poisoned():
        found = launch(given, 1.0)
    wide = given._replace(**{name: x.double() for name, x in given._asdict().items() if isinstance(x, torch.Tensor)},
                          steps=steps._replace(**{name: getattr(steps, name).double() for name in
                                                  ("dt", "A", "bias", "skip")}))
    want, peer, room = launched(wide, 1.0), launched(given, 1.0), 1 + 130 / 16
    assert_2x(found.o, want.o, peer.o, what="o")
    for name in ("state", "dots", "of_skip"):
        three = (getattr(x, name) for x in (found, want, peer))
        assert_2x(*(x.flatten(0, -2) for x in three), ulps=room, bias_ulps=room, what=name)
