"""Overlapping segments of few long sequences, where no GPU is needed: when there are some, and what is
launched."""
import itertools

import pytest
import torch

import tkq
from tests.helpers.emulation import fake_gpu
from tkq.linear_attention.catalog import shipped
from tkq.linear_attention.overlap.plan import Sizes as OverlapSizes
from tkq.linear_attention.overlap.plan import segment_count
from tkq.linear_attention.spec import LinearSpec
from tkq.linear_attention.split.plan import REACHED
from tkq.linear_attention.split.spec import ReachSpec


@pytest.mark.parametrize("states, dtype", [(False, torch.float32), (True, torch.float32), (False, torch.bfloat16)])
def test_segments_of_the_delta_rule(states, dtype):
    """Two long sequences without gradients: one launch behind the one that says what reaches segments; both shipped.
    With gradients, of no gates, of short ones or of many there are none."""
    q, k, v = (torch.zeros(1, 8192, 32, 128, dtype=torch.bfloat16).expand(2, -1, -1, -1) for _ in range(3))
    g, beta = torch.zeros(2, 8192, 32), torch.zeros(2, 8192, 32, dtype=dtype)
    more = dict(initial_state=torch.zeros(2, 32, 128, 128), output_final_state=True) if states else {}
    with fake_gpu.launches() as seen, torch.no_grad():
        tkq.gated_delta_rule(q, k, v, g, beta, **more)
    (ahead, (_, _, _, found)), (rule, (_, others, *_)) = seen
    assert ahead.args == (ReachSpec("bf16", 128, {torch.float32: "fp32"}.get(dtype, "bf16")),)
    assert rule.args[0].overlapping and rule.args[0].initial == rule.args[0].final == ("fp32" if states else None)
    assert found.shape == (1, 4, 32) and others[-1].shape == (2, 1, 32)
    assert torch.equal(others[-1], found.view(2, 2, 32)[:, :1])
    assert {ahead, rule} <= {kernel.recipe for kernel in shipped()}
    for others in ((q[:, :2048], k[:, :2048], v[:, :2048], g[:, :2048], beta[:, :2048]), (q, k, v, None, beta),
                   [x[:1].expand(8, *x.shape[1:]) for x in (q, k, v, g, beta)],
                   (q, k, v.clone().requires_grad_(), g, beta)):
        with fake_gpu.launches() as seen:
            tkq.gated_delta_rule(*others)
        assert not any(r.args[0].overlapping for r, _ in seen if isinstance(r.args[0], LinearSpec))


def test_segments_are_planned_as_time_says():
    """Where all blocks have an SM each; more chunks that reach, or a shorter sequence, are no reason for more."""
    for B, H, S in itertools.product((1, 2, 3), (8, 16, 32, 48), (64, 2048, 2560, 8192, 1 << 18)):
        counts = [segment_count(OverlapSizes(B, H, S, 1, 132, reached)) for reached in (0, 4, 8, 32)]
        assert counts == sorted(counts, reverse=True) and (counts[0] == 1 or counts[0] * B * H <= 132)
        assert segment_count(OverlapSizes(B, H, 2 * S, 1, 132, 8)) >= counts[2]
    for sequences, count in ((2, 2), (3, 1)):
        assert segment_count(OverlapSizes(sequences, 32, 8192, 1, 132, REACHED)) == count


@pytest.mark.parametrize("more", [dict(gate="none"), dict(delta=None), dict(updates=True, inverse="out"),
                                  dict(packed="int32"), dict(value_dim=64), dict(checkpoints="fp32"),
                                  dict(pool="int32", initial="fp32", final="fp32"), dict(head_dim=96),
                                  dict(part="outputs", initial="fp32", inverse="in")])
def test_what_does_not_overlap(more):
    with pytest.raises(ValueError, match="LinearSpec: reach, allowed is with delta and a gate"):
        LinearSpec(**dict(dtype="bf16", head_dim=128, value_dim=128, gate="token", delta="fp32", reach=True) | more)
