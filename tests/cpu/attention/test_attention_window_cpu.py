"""What each warpgroup of a window's task does: it goes through the tiles that its rows see, and leaves out what none
of them sees."""
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tkq.attention.common.mask import LOWER, ROWS, TILE, UPPER, Extent, key_blocks_of, keys_of_row, tiles_of_warpgroup
from tkq.attention.forward.config import AttentionConfig, WindowConfig
from tkq.attention.forward.spec import AttentionSpec
from tkq.attention.forward.window_plan import builder_of, window_plan

# As the plan takes them: no more queries than keys, and a left limit of 512 or more.
EXTENTS = st.builds(
    lambda rows, more, left, right: Extent(rows, rows + more, 2 * ROWS, TILE, left, right), st.integers(1, 6000),
    st.sampled_from((0, 0, 1, 63, 64, 128)) | st.integers(0, 4000),
    st.sampled_from((512, 575, 576, 577, 1023, 1024)) | st.integers(512, 3000),
    st.sampled_from((0, 0, 1, 63, 64, 511)) | st.integers(0, 6000))


@settings(max_examples=100)
@example(Extent(6000, 6000, 2 * ROWS, TILE, 576, 511))
@example(Extent(1, 513, 2 * ROWS, TILE, 1023, 0))
@given(EXTENTS)
def test_what_rows_see_is_visited(e):
    for first_row in range(0, e.rows_q, e.tile_rows):
        task = key_blocks_of(e, first_row)
        for row in (first_row, first_row + ROWS):
            t = tiles_of_warpgroup(e, task, row)
            assert t["before"] >= 0 and t["after"] >= 0 and t["blocks"] >= 1
            assert t["before"] + t["blocks"] + t["after"] == task.blocks, "as many turns for both warpgroups"
            assert t["first"] == task.first + t["after"]
            if row < e.rows_q:
                visits(e, t, row)


def visits(e, t, row):
    """Nothing that rows row .. row + 63 see is left out. Of a tile of which half is left out, the mask is that of its
    other half alone, and it is neither the only tile nor both the first and the last."""
    assert not t["cut"] or t["n_masked_right"] + t["n_masked_left"] < t["blocks"] + (t["cut"] == UPPER)
    assert t["cut"] != LOWER or t["n_masked_right"] == 1
    assert t["cut"] != UPPER or t["n_masked_left"] >= 1
    start = t["first"] * TILE + (t["cut"] == UPPER) * (TILE // 2)
    end = (t["first"] + t["blocks"]) * TILE - (t["cut"] == LOWER) * (TILE // 2)
    for r in {row, min(row + ROWS, e.rows_q) - 1}:
        first, stop = keys_of_row(e, r)
        assert start <= first and stop <= end


def test_a_window_of_1024_keys_takes_eight_tiles_and_a_half():
    for left, right in ((1023, 0), (512, 511)):
        e = Extent(16384, 16384, 2 * ROWS, TILE, left, right)
        for row in (8192, 8192 + ROWS):
            t = tiles_of_warpgroup(e, key_blocks_of(e, 8192), row)
            assert (t["blocks"], t["before"], t["after"]) == (9, 0, 0)
            assert t["cut"] == (UPPER if row % TILE else LOWER)


def test_which_windows_take_it():
    long_window = dict(left=True, long_window=True)
    for wanted, spec, length in (
            (True, AttentionSpec(causal=True, **long_window), "long"),
        (True, AttentionSpec(right=True, **long_window), "medium"),
            (True, AttentionSpec(causal=True, softcap=True, sinks="fp32", **long_window), "long"),
            (False, AttentionSpec(causal=True, **long_window), "short"),
        (False, AttentionSpec(causal=True, left=True), "long"),
            (False, AttentionSpec(**long_window), "long"), (False, AttentionSpec(causal=True), "long"),
            (False, AttentionSpec(causal=True, varlen=True, **long_window), "long"),
            (False, AttentionSpec(causal=True, pack=2, **long_window), "long"),
            (False, AttentionSpec(head_dim=64, causal=True, **long_window), "long")):
        found = window_plan(spec, length)
        assert (found is not None) == wanted, spec
        assert found is None or found.check(128, 128)
    assert builder_of(WindowConfig()) == "tkq.attention.forward.window:WindowForward"
    assert builder_of(AttentionConfig()) == "tkq.attention.forward.kernel:AttentionForward"


@pytest.mark.parametrize("wrong", (dict(kv=112), dict(consumers=1), dict(cluster=2), dict(overlap_tasks=True)))
def test_what_it_cannot_be_built_as(wrong):
    with pytest.raises(ValueError):
        WindowConfig(**wrong).check(128, 128)
