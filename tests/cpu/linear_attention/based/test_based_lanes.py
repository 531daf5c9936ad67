"""Where a thread puts features, and what it makes of their gradients: the kernels' own functions with plain numbers,
once for each lane of four."""
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.based_launches import chain as chain_in_torch
from tkq.linear_attention.based import chain, features
from tkq.linear_attention.based.layout import BLOCKS, COLUMNS, FIRST, columns


class Row:
    """As `features.Row` of a lane, of rows whose column i is the number i; a word is a pair."""

    def __init__(self, lane, value=lambda i: i):
        self.lane, self.upper, self.first_lane = lane, lane >= 2, lane == 0
        self.words = [[tuple(value((4 * lane + 2 * m + e) % 16) for e in range(2)) for m in range(6)]] * 2

    def pair(self, r, m):
        numbers = [x for word in self.words[r] for x in word]
        return numbers[m], numbers[m + 1]


class Words(dict):
    """A register tile as words: what is stored stays."""

    tensor = property(lambda self: self)
    dtype = None


@pytest.fixture
def plain(monkeypatch):
    """The DSL's functions on Python's numbers."""
    for module in (features, chain):
        monkeypatch.setattr(module, "cute", SimpleNamespace(recast_tensor=lambda x, _: x, math=SimpleNamespace(
            fma=lambda a, b, c: a * b + c)))
        monkeypatch.setattr(module, "cutlass", SimpleNamespace(select_=lambda c, a, b: a if c else b))
    monkeypatch.setattr(features, "one", lambda x, dtype: ((), None) if x.first_lane else (None, None))
    monkeypatch.setattr(features, "_mul2", lambda a, b, dtype: tuple(zip(a, b)))
    monkeypatch.setattr(chain, "Float32", float)
    monkeypatch.setattr(chain, "tk", SimpleNamespace(lane_id=lambda: None))
    monkeypatch.setattr(chain, "_wide", lambda word, half, dtype: word[half])


def test_features_are_where_the_layout_says(plain):
    found = {}
    for lane in range(4):
        tiles = Words(), Words()
        features.make(*tiles, Row(lane))
        assert [len(x) for x in tiles] == [2 * FIRST // 8, 2 * (COLUMNS - FIRST) // 8]
        for tile, first in zip(tiles, (0, FIRST // 8)):
            for word, pair in tile.items():
                for e, made in enumerate(pair):
                    at = 8 * (first + word // 2) + 2 * lane + e
                    made = (made,) if isinstance(made, int) else made
                    assert found.setdefault(at, made) == made  # both rows alike
    assert [found[i] for i in range(COLUMNS)] == columns()


def test_gradients_of_features_become_those_of_columns(plain, monkeypatch):
    torch.manual_seed(0)
    x, d = torch.randn(16, dtype=torch.float64), torch.randn(COLUMNS, dtype=torch.float64)
    sums = [None] * 4
    monkeypatch.setattr(chain, "_of_quad", lambda s, e, lane: sums.__setitem__(lane_now[0], s) or s[e])
    lane_now = [0]
    for lane in range(4):
        lane_now[0] = lane

        class Tile:
            def __init__(self, first):
                self.rows_view = {(r, j): d[8 * (first + j // 2) + 2 * lane_now[0] + j % 2].item()
                                  for r in range(2) for j in range(2 * (BLOCKS - first))}

        chain.of_features(Tile(0), Tile(FIRST // 8), Row(lane, lambda i: x[i].item()), None)
    # the m-th lane below has this lane's columns as its own from 4 m on
    found = [sum(sums[(lane - m) % 4][4 * m + e] for m in range(3)) for lane in range(4) for e in range(4)]
    torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), chain_in_torch(d, x))


def test_what_the_lanes_below_have(monkeypatch):
    """`_of_quad`'s lanes, by a warp of Python's numbers."""
    held = [[100 * lane + i for i in range(chain.HELD)] for lane in range(32)]
    monkeypatch.setattr(chain, "Int32", int)
    for lane in range(32):
        monkeypatch.setattr(chain, "cute", SimpleNamespace(arch=SimpleNamespace(
            shuffle_sync=lambda value, source: held[source][value % 100])))
        quad = lane // 4 * 4
        for e in range(4):
            want = sum(held[quad + (lane - m) % 4][4 * m + e] for m in range(3))
            assert chain._of_quad(held[lane], e, lane) == want
