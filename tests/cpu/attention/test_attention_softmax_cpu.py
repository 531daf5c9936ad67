"""The forward's online softmax: which scores may stay beside a maximum that is not theirs, of floats as bits; and that
what comes out is as good as with the largest score, by a model of it in float32."""
import math
import struct

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tkq.attention.forward.softmax import BELOW, LEAST, RESCALE_THRESHOLD, of_three

SCORES = st.floats(-1e4, 1e4, width=32) | st.floats(-20, 20, width=32) | st.just(-math.inf)
ROUNDED = {"bf16": 8, "fp16": 11}  # bits of a number of P


def bits(x):
    return struct.unpack("<i", struct.pack("<f", x))[0]


def value(i):
    return struct.unpack("<f", struct.pack("<i", i))[0]


def out_of_range(scores, row_max):
    """As ``Softmax.out_of_range``, of scaled scores."""
    return row_max < -RESCALE_THRESHOLD or value(max(map(bits, scores))) - row_max > RESCALE_THRESHOLD


@settings(max_examples=300)
@given(st.lists(SCORES, min_size=32, max_size=32), st.floats(-30, 30, width=32))
def test_nothing_out_of_range_is_missed(scores, row_max):
    out = out_of_range(scores, row_max)
    assert out or max(scores) - row_max <= RESCALE_THRESHOLD
    assert not out or row_max < -RESCALE_THRESHOLD or max(scores) - row_max > RESCALE_THRESHOLD


@pytest.mark.parametrize("n", (3, 8, 16, 31))
def test_nothing_is_left_out(n, monkeypatch):
    monkeypatch.setattr("tkq.attention.forward.softmax.cutlass.max", max)
    for largest in range(n):
        assert of_three([int(i == largest) for i in range(n)]) == 1


def rounded(x, dtype):
    """To bf16's or fp16's numbers."""
    if dtype == "fp16":
        return x.astype(np.float16).astype(np.float32)
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.round(mantissa * 256) / 256, exponent).astype(np.float32)


def model(blocks, values, dtype):
    """(O, log-sum-exp of base 2, how often max moved) of a row whose scaled scores come in blocks, as ``Softmax`` has
    it."""
    top, norm, o, moved = np.float32(-math.inf), np.float32(0), np.float32(0), 0
    for i, (x, v) in enumerate(zip(blocks, values)):
        if i == 0 or out_of_range(x, top):
            before, top = top, max(top, x.max())
            if top >= LEAST - BELOW[dtype]:
                top = max(top, np.float32(LEAST))
            shift, moved = (np.float32(0) if top == -math.inf else top), moved + 1
            correct = np.exp2(before - shift)
            norm, o = norm * correct, o * correct
        p = np.exp2(x - (np.float32(0) if top == -math.inf else top))
        norm += p.sum(dtype=np.float32)
        o += (rounded(p, dtype) * v).sum(dtype=np.float32)
    return (o / norm, top + np.log2(norm), moved) if norm else (np.float32(0), -math.inf, moved)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(("bf16", "fp16")), st.integers(0, 2 ** 31), st.floats(-200, 200), st.floats(0, 20),
       st.floats(-40, 40), st.integers(0, 3))
@example("bf16", 0, LEAST - BELOW["bf16"], 1.0, 0.0, 0)
@example("fp16", 0, LEAST - BELOW["fp16"], 1.0, 0.0, 1)
def test_results_are_as_good_as_with_the_largest_score(dtype, seed, mean, spread, slope, hidden):
    """Blocks whose scores lie anywhere, rise or fall from block to block; of the first ones no key is seen."""
    rng = np.random.default_rng(seed)
    blocks = [(mean + slope * i + spread * rng.standard_normal(64)).astype(np.float32) for i in range(6)]
    blocks[:hidden] = [np.full(64, -math.inf, np.float32)] * hidden
    values = [rng.standard_normal(64).astype(np.float32) for _ in blocks]
    o, lse, _ = model(blocks, values, dtype)
    scores, v = (np.concatenate(x).astype(np.float64) for x in (blocks, values))
    p = np.exp2(scores - scores.max())
    true_lse = scores.max() + np.log2(p.sum())
    assert abs(lse - true_lse) <= 4e-6 * max(1, abs(true_lse)) + 4e-6
    assert abs(o - (p * v).sum() / p.sum()) <= 2.0 ** -ROUNDED[dtype] * (p * abs(v)).sum() / p.sum() * 1.02 + 1e-6


@pytest.mark.parametrize("dtype", BELOW)
@pytest.mark.parametrize("top", (0.0, LEAST, LEAST - 0.5, LEAST - 8.0, LEAST - 64.0, LEAST - 65.0))
def test_many_keys_of_little_weight_count(dtype, top):
    """One key whose value is 0, and 16383 of 2 ** -17 of its weight each, which have a ninth of it together."""
    scores, values = np.full(16384, top - 17.0, np.float32), np.ones(16384, np.float32)
    scores[0], values[0] = top, 0.0
    o, lse, _ = model(scores.reshape(-1, 128), values.reshape(-1, 128), dtype)
    weight = 16383 * 2.0 ** -17
    assert abs(o - weight / (1 + weight)) <= 5e-4 and abs(lse - top - math.log2(1 + weight)) <= 1e-5


@pytest.mark.parametrize("mean, most", ((0.0, 1), (-20.0, 1), (-68.0, 1), (30.0, 1), (-100.0, 6)))
def test_what_moves_and_what_does_not(mean, most):
    """Usual rows take the branch with few instructions, also where all their scores are low; but for very low ones."""
    rng = np.random.default_rng(0)
    blocks = [(mean + rng.standard_normal(64)).astype(np.float32) for _ in range(6)]
    assert model(blocks, blocks, "bf16")[2] == most


def test_all_hidden():
    blocks = [np.full(64, -math.inf, np.float32)] * 2
    assert model(blocks, [np.zeros(64, np.float32)] * 2, "bf16")[:2] == (0, -math.inf)
