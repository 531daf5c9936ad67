"""Which scores may stay beside a maximum that is not theirs: the rule of ``halves_light``, of floats as bits."""
import math
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tkq.attention.halves_config import HalvesConfig
from tkq.attention.halves_light import ROOM, of_three
from tkq.attention.halves_light_config import LightConfig
from tkq.attention.halves_plan import builder_of

SCORES = st.floats(-1e4, 1e4, width=32) | st.floats(-20, 20, width=32) | st.just(-math.inf)


def bits(x):
    return struct.unpack("<i", struct.pack("<f", x))[0]


def value(i):
    return struct.unpack("<f", struct.pack("<i", i))[0]


@settings(max_examples=300)
@given(st.lists(SCORES, min_size=32, max_size=32), st.floats(-30, 30, width=32))
def test_scores_in_range_are_in_range(scores, low):
    """As ``LightSoftmax.out_of_range`` has it, of scores that are scaled."""
    top = value(max(map(bits, scores)))
    out = low < -ROOM or top - low > ROOM
    assert out or max(scores) - low <= ROOM
    if low >= -ROOM and max(scores) - low > ROOM:
        assert out


@pytest.mark.parametrize("n", (3, 8, 16, 31))
def test_nothing_is_left_out(n, monkeypatch):
    monkeypatch.setattr("tkq.attention.halves_light.cutlass.max", max)
    for largest in range(n):
        assert of_three([int(i == largest) for i in range(n)]) == 1


def test_its_configuration():
    assert builder_of(LightConfig()) == "tkq.attention.halves_light:build"
    assert builder_of(HalvesConfig()) == "tkq.attention.halves:build"
    for refused in (dict(bridge=True), dict(ahead=True), dict(late=True)):
        with pytest.raises(ValueError, match="allowed is neither"):
            LightConfig(**refused).check(128, 128)
