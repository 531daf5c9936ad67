"""Into how many segments sums behind each token are cut, and what a spec of them refuses."""
import itertools

import pytest

from tkq.linear_attention.spec import ProductsSpec, StepSpec, SuffixSpec
from tkq.linear_attention.suffix.plan import EACH, HEADS, LANES, SEGMENTS, TILE, segment_count


def test_segments_have_whole_tiles():
    """None of a batch is without one; their number grows with the tokens, up to as many as a block reads totals of."""
    for tokens in itertools.chain(range(1, 3000, 37), (SEGMENTS * TILE, SEGMENTS * TILE + 1, 1 << 20)):
        tiles, count = -(-tokens // TILE), segment_count(tokens)
        each = -(-tiles // count)
        assert 1 <= count <= SEGMENTS and (count - 1) * each < tiles
        assert count == tiles or tiles > SEGMENTS
    assert segment_count(0) == segment_count(0, 3) == 1


def test_segments_of_packed_sequences():
    """As many as a sequence of the mean length has whole tiles, whatever their number."""
    for tokens, sequences in itertools.product((0, 1, TILE, 100 * TILE, 1 << 20), (0, 1, 3, 1000)):
        count = segment_count(tokens, sequences)
        assert 1 <= count <= SEGMENTS
        assert count == 1 or count * max(sequences, 1) * TILE <= tokens + TILE


def test_a_block_has_whole_warps():
    """Of which each has a line of 128 bytes of neighbouring heads."""
    assert SEGMENTS % LANES == 0  # each lane has as many totals
    assert HEADS == 32 and LANES & (LANES - 1) == 0 and HEADS * LANES <= 1024 and TILE == LANES * EACH


@pytest.mark.parametrize("given, words", [(dict(x=0), "x is 0, allowed are 1 to 8"), (dict(less=9), "less is 9"),
                                          (dict(steps=StepSpec("bf16")), "steps, allowed is with less"),
                                          (dict(packed="fp32"), "packed")])
def test_what_a_spec_refuses(given, words):
    with pytest.raises(ValueError, match=f"SuffixSpec: {words}"):
        SuffixSpec(**given)


@pytest.mark.parametrize("head_dim", [16, 40, 272])
def test_what_a_spec_of_products_refuses(head_dim):
    with pytest.raises(ValueError, match=f"ProductsSpec: head_dim is {head_dim}"):
        ProductsSpec(head_dim)
