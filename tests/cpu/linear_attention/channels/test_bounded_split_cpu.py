"""Segments of Kimi's delta rule with bounded gates, where no GPU is needed: how many there are, what reaches them, and
what is launched."""
import itertools

import pytest
import torch
from torch.nn.functional import normalize

import tkq
from tests.helpers.bounded_reach import norms, of_layer, reach
from tests.helpers.emulation import fake_gpu
from tkq.linear_attention.channels.bounded.plan import REACHED
from tkq.linear_attention.channels.catalog import shipped
from tkq.linear_attention.channels.spec import BoundedReachSpec, ChannelSpec
from tkq.linear_attention.config import ALL
from tkq.linear_attention.overlap.plan import GAIN, LAUNCH, SHORTEST, Sizes, segment_count
from tkq.linear_attention.split.reach import NOTHING
from tkq.reference.linear_attention import linear_attn as recurrence

K = 128

# ---- the plan ---------------------------------------------------------------------------------------------------


def test_every_plan():
    """No segment is empty or shorter than launches are worth, none waits for an SM, and what is cut takes less time by
    the plan's own count."""
    for B, H, S, parts in itertools.product((0, 1, 2, 8, 300), (1, 16, 32, 80), (0, 1, 64, 511, 2048, 32768, 1 << 20),
                                            (1, 2)):
        count, chunks = segment_count(Sizes(B, H, S, parts, 132, REACHED)), -(-S // 64)
        assert count >= 1
        if count > 1:
            each = -(-chunks // count)
            assert each >= SHORTEST and (count - 1) * each < chunks and count * B * H * parts <= 132
            assert each + REACHED + LAUNCH <= GAIN * chunks


@pytest.mark.parametrize("sizes, count", [
    ((1, 32, 32768, 1), 4), ((2, 32, 8192, 1), 2), ((8, 32, 2048, 1), 1), ((1, 32, 2048, 1), 4), ((1, 32, 512, 1), 1),
    ((1, 48, 32768, 1), 2), ((1, 96, 32768, 1), 1), ((1, 32, 32768, 2), 2), ((1, 1, 1 << 20, 1), 132)])
def test_calls_of_models(sizes, count):
    assert segment_count(Sizes(*sizes, 132, REACHED)) == count


def test_longer_ones_have_no_fewer_segments():
    for heads in (1, 4, 16, 32):
        counts = [segment_count(Sizes(1, heads, 1 << n, 1, 132, REACHED)) for n in range(6, 21)]
        assert counts == sorted(counts) and counts[0] == 1 < counts[-1]


# ---- what reaches a segment -------------------------------------------------------------------------------------


def make(S, spread=1.0, shift=0.0, beta=None, alike=False):
    """k, x, beta, A_log, dt_bias of two heads, in float64."""
    torch.manual_seed(0)
    k = torch.randn(1, S, 2, K, dtype=torch.float64)
    k = k[:, :1] + 0.2 * k if alike else k
    betas = torch.rand(1, S, 2, dtype=torch.float64)
    return (k, spread * torch.randn(1, S, 2, K, dtype=torch.float64),
            betas if beta is None else torch.full_like(betas, beta), torch.tensor([0.0, 1.5]).double(),
            shift + 0.1 * torch.randn(2 * K).double())


CASES = [dict(), dict(beta=1.0), dict(beta=2.0), dict(beta=2.5), dict(beta=-0.5), dict(alike=True, beta=1.0),
         dict(alike=True, beta=2.0, shift=-1.0), dict(shift=-2.0), dict(shift=-8.0), dict(spread=8.0)]


@pytest.mark.parametrize("case", CASES)
def test_bounds_of_norms(case):
    """Of 16 tokens: none is below the norm of the product of their matrices."""
    k, x, beta, *rest = make(64, **case)
    k, g = of_layer(k, x, *rest, -5.0)
    found = norms(k, g, beta)
    for h, n in itertools.product(range(2), range(4)):
        made = torch.eye(K, dtype=torch.float64)
        for t in range(16 * n, 16 * n + 16):
            made = g[0, t, h].exp()[:, None] * made
            made = made - beta[0, t, h] * torch.outer(k[0, t, h], k[0, t, h] @ made)
        norm = torch.linalg.matrix_norm(made, 2).log2()
        assert norm <= found[0, n, h] + 1e-9, (h, n)


@pytest.mark.parametrize("case, most", [(dict(), 4), (dict(beta=1.0), 6), (dict(shift=-1.0), 4), (dict(shift=-1.5), 6)])
def test_what_does_not_reach_leaves_nothing(case, most):
    """In float64: of a state before the chunks that reach a segment nothing is left in front of it. most: of a head
    whose gates forget that much."""
    k, x, beta, A_log, bias = make(2048, **case)
    found, _ = reach(k, x, beta, A_log, bias, -5.0, 2)
    k, g = of_layer(k, x, A_log, bias, -5.0)
    before = torch.randn(1, 2, K, 4, dtype=torch.float64)
    reached = {h: count for h, count in enumerate(found[0, 0].tolist()) if count < ALL}
    assert 0 < max(reached.values()) <= most
    for h, count in reached.items():
        at = slice(1024 - 64 * count, 1024)
        k_, g_, b_ = (y[:, at, h:h + 1] for y in (k, g, beta))
        _, left = recurrence(k_, k_, k_.new_zeros(*k_.shape[:3], 4), g_, beta=b_, initial_state=before[:, h:h + 1])
        assert left.norm() <= 2.0**NOTHING * before[:, h].norm()


def test_columns_that_never_forget_reach():
    """One of them is enough; and heads do not decide for each other."""
    k, x, beta, A_log, bias = make(2048)
    bias[K + 5] = -100.0
    found, _ = reach(k, x, beta, A_log, bias, -5.0, 2)
    assert found[0, 0, 0] < ALL and found[0, 0, 1] == ALL


# ---- launches ---------------------------------------------------------------------------------------------------


def call(S, **more):
    q, k, v, x = (normalize(torch.randn(1, S, 4, K), dim=-1).bfloat16() for _ in range(4))
    return tkq.gated_delta_rule(q, k, v, x, torch.rand(1, S, 4), A_log=torch.zeros(4), use_qk_l2norm_in_kernel=True,
                                use_gate_in_kernel=True, gate_lower_bound=-5.0, **more)


@pytest.mark.parametrize("states", [False, True])
def test_launches(states):
    """Of a long sequence two, of which the second takes what the first makes; both are in the catalog."""
    more = dict(initial_state=torch.zeros(1, 4, K, K), output_final_state=True) if states else {}
    with fake_gpu.launches() as seen:
        call(2048, **more)
    (ahead, (_, _, found, _)), (rule, (_, others, *_)) = seen
    assert ahead.args == (BoundedReachSpec("fp32"),) and rule.args[0].reach and rule.args[0].initial == (
        "fp32" if states else None)
    assert found.shape == (1, 3, 4) and found.dtype == torch.int32 and others[-1] is found
    assert {ahead, rule} <= {kernel.recipe for kernel in shipped()}


def test_what_is_left_whole():
    """Short ones, and packed ones, whose lengths the GPU alone knows."""
    for S, more in ((512, {}), (2048, dict(cu_seqlens=torch.tensor([0, 2048])))):
        with fake_gpu.launches() as seen:
            call(S, **more)
        (rule, (_, others, *_)), = seen
        assert not rule.args[0].reach and others[-1] is None


def test_what_a_spec_refuses():
    given = dict(dtype="bf16", head_dim=128, value_dim=128, delta="fp32", l2norm=True, reach=True)
    for more in (dict(), dict(bounded=True, packed="int32")):
        with pytest.raises(ValueError, match="ChannelSpec: reach, allowed is with bounded, without packed"):
            ChannelSpec(**given | more)
    with pytest.raises(ValueError, match="BoundedReachSpec: beta is 'fp16'"):
        BoundedReachSpec("fp16")
