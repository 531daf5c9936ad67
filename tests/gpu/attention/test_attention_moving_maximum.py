"""Scores that rise, fall, or lie far from 0, on a GPU: what is subtracted from them moves in each tile, in some, or
never; by the kernels that are planned for the other tests."""
import math

import pytest
import torch

from tests.helpers.attention.inputs import compare, make, run
from tkq.attention.forward.plan import LENGTHS, plan
from tkq.attention.forward.softmax import BELOW, LEAST
from tkq.attention.forward.spec import AttentionSpec

LOG2E = 1.4426950408889634


def moved_by(q, k, exponents):
    """q and k whose scores, as exponents of 2, are moved by a number, or by one for each key."""
    q, k = q.clone(), k.clone()
    q[..., 0] = 4
    along = torch.as_tensor(exponents, device="cuda").expand(k.shape[1])
    k[..., 0] = (along / LOG2E * q.shape[-1] ** 0.5 / 4)[None, :, None].to(k.dtype)
    return q, k


def cases(keys, dtype):
    ramp = torch.arange(keys, device="cuda") / keys
    edge = LEAST - BELOW[dtype]
    for at in (30.0, -5.0, -12.0, -20.0, edge + 2, edge, edge - 2, -100.0):
        yield f"all at {at}", at
    yield "rising to the first key", 60 - 120 * ramp
    yield "rising to the last key", 120 * ramp - 60
    yield "up from below what is least", 80 * (1 - ramp) - 80
    yield "down to below what is least", 80 * ramp - 80
    yield "a step", torch.where(ramp < 0.5, 20.0, -20.0)


@pytest.mark.parametrize("dim, causal, dtype", ((64, False, "bf16"), (64, True, "bf16"), (128, False, "bf16"),
                                                (128, True, "bf16"), (256, True, "bf16"),
                                                pytest.param(128, True, "fp16", marks=pytest.mark.slow)))
def test_each_plan(dim, causal, dtype):
    spec = AttentionSpec(dtype, dim, causal)
    for config in dict.fromkeys(plan(spec, length) for length in LENGTHS):
        for rows, keys in ((641, 641), (65, 1999)):
            q, k, v = make(1, rows, keys, 2, 1, dim, {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype])
            for what, exponents in cases(keys, dtype):
                compare(*moved_by(q, k, exponents), v, f"{rows} x {keys} {what} {config}", config=config, causal=causal)


@pytest.mark.parametrize("right", (0, 64))
def test_windows(right):
    q, k, v = make(1, 1290, 1353, 2, 2, 128)
    for what, exponents in cases(1353, "bf16"):
        compare(*moved_by(q, k, exponents), v, what, left=600, right=right)


@pytest.mark.parametrize("dtype", ("bf16", "fp16"))
def test_many_keys_of_little_weight_count(dtype):
    """One key in the last tile whose values are 0, and 8191 of 2 ** -16 of its weight: a ninth of it together."""
    config = plan(AttentionSpec(dtype, 128, True), "medium")
    q, k, v = make(1, 65, 8192, 2, 2, 128, {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype])
    q, k, v = q * 0.1, k * 0.1, torch.ones_like(v)
    v[:, 8100] = 0
    for top in (0.0, LEAST, LEAST - 1, LEAST - 7, LEAST - 8, LEAST - 60):
        exponents = torch.full((8192,), top - 16, device="cuda")
        exponents[8100] = top
        compare(*moved_by(q, k, exponents), v, f"{top}", config=config, causal=True)


@pytest.mark.parametrize("causal", (False, True))
def test_a_row_does_not_depend_on_those_beside_it(causal):
    """Bit for bit, also where the maximum of those moves in each tile, or is not a number."""
    q, k, v = make(1, 641, 1999, 2, 2, 128)
    first = run_alone(q, k, v, causal)
    for change in (lambda x: x * 40, lambda x: x * math.nan, lambda x: x * 0, lambda x: -x):
        other = q.clone()
        other[:, ::3] = change(q[:, ::3])
        found = run_alone(other, k, v, causal)
        for rows in (slice(1, None, 3), slice(2, None, 3)):
            assert torch.equal(found[:, rows], first[:, rows])


def run_alone(q, k, v, causal):
    o = torch.full_like(q, math.nan)
    run(q, k, v, o, torch.full((1, 2, q.shape[1]), math.nan, device="cuda"), causal=causal)
    return o


def test_small_values_beside_low_scores():
    """P of 2 ** -62 and values of 1e-4 are no trouble."""
    q, k, v = make(1, 641, 641, 2, 2, 128)
    compare(*moved_by(q, k, -69.0), v * 1e-4, "small values", causal=False)
