"""What a block of packed sequences sees of a kernel's tensors: its own sequence, of all that has tokens."""
import pytest

from tkq.linear_attention.channels.values import OfValues
from tkq.linear_attention.engine.fields import Globals
from tkq.linear_attention.engine.packed import Piece, placed
from tkq.tile import gl

PIECE = Piece(first=70, end=199, rows=129, state=1)
READ = "q", "k", "v", "x", "q2", "k2", "v2", "inverse", "less"
WRITTEN = "o", "dv", "kept"


class Rows(gl):
    """In the place of a descriptor: how many rows a piece of it has."""

    def __init__(self, size=None):
        object.__setattr__(self, "size", size)

    def part(self, size):
        return Rows(size)


def given(own=None):
    return Globals(**{name: Rows() for name in READ + WRITTEN}, scale=1.0, tokens=300, heads_per_k=1, heads_per_v=1,
                   own=own)


@pytest.mark.parametrize("piece", [PIECE, PIECE._replace(rows=0)])
def test_every_descriptor_is_that_of_a_piece(piece):
    """Of no sequence: no token is read, and all are written."""
    found = placed(given(), piece)
    assert found.tokens == piece.rows and found.own is None
    assert [getattr(found, name).size for name in READ] == [piece.rows] * len(READ)
    assert [getattr(found, name).size for name in WRITTEN] == [129] * len(WRITTEN)


def test_those_that_only_one_package_has_too():
    """What is a state's stays as it is, and what is not there."""
    own = OfValues(of_x=Rows(), end="of states", second=Rows(), o2=Rows(), rest=None)
    found = placed(given(own), PIECE._replace(rows=0)).own
    assert (found.of_x.size, found.second.size, found.o2.size) == (129, 0, 129)
    assert found.end == "of states" and found.rest is None
