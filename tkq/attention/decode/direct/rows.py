"""Rows of a step of keys: where they lie, and their words on the way into a warp's registers."""
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

import tkq.tile as tk
from tkq.attention.decode.copies import address_from
from tkq.attention.decode.direct.fragments import WORD, load_words
from tkq.attention.decode.pages import Looked, Pages


class Piece(NamedTuple):
    """What lanes read of a row with one load: ``bytes`` each, neighbours in the order of their lanes, from column
    ``first`` on. word: the first of a lane's words of the row."""

    first: int
    bytes: int
    word: int


def pieces(columns: int, lanes: int) -> list:
    """Of a row of e4m3 that ``lanes`` neighbours read: loads of 16 bytes as far as they go, then of 8, then of 4."""
    found, first, word = [], 0, 0
    for size in (16, 8, 4):
        while columns - first >= size * lanes:
            found.append(Piece(first, size, word))
            first, word = first + size * lanes, word + size // WORD
    assert first == columns, f"pieces of {columns} columns in {lanes} lanes"
    return found


class DirectRows:
    """Of K four lanes read a row, lane 4 * g + t rows g and g + 8 of each 16; of V eight lanes, and it reads rows 2t,
    2t + 1, 2t + 8 and 2t + 9: what the fragments of its products take."""

    def __init__(self, spec, config):
        self.spec, self.config, self.pages = spec, config, Pages(spec, config)
        self.k_pieces, self.v_pieces = pieces(spec.head_dim, 4), pieces(spec.head_dim_v, 8)
        self.tiles = config.step // 16

    def own(self, key):
        """This lane's key, of the step that begins with ``key``: with 16 keys two lanes have each."""
        return key + tk.lane_id() % self.config.step

    def start(self, g, first, stride):
        """(page of the sequence, row of it) of this lane's key, and how far the next step's is; see `Pages.after`."""
        key = self.own(first)
        if not self.spec.paged:
            return (Int32(0), key), (Int32(0), stride)
        page, step = key // g.page_size, stride // g.page_size
        return (page, key - page * g.page_size), (step, stride - step * g.page_size)

    @cute.jit
    def find(self, g, s, place, step, first):
        """((page, row of it, has the part such a key?), the next step's place). Nothing waits for the page here."""
        number, row = place
        seen = self.own(first) < s.length
        if const_expr(self.spec.paged):
            if seen:
                number = g.table[s.source, number]
            place = self.pages.after(g, place, step)
        else:
            number = s.source
            place = place[0], row + step[1]
        return (number, row, seen), place

    def look(self, g, s, found) -> Looked:
        page, row, seen = found
        here, fault = self.pages.judge(g, page, seen)
        k, v = (self.pages.address(x, s, page, row, here) for x in (g.k, g.v))
        return Looked(k, v, Int32(page), Int32(row), cute.arch.vote_ballot_sync(here), cutlass.Boolean(fault))

    def load_k(self, held, rows):
        """A step's words of K are asked for."""
        g, t = tk.lane_id() // 4, tk.lane_id() % 4
        self.load(held, rows.k, rows.there, [(16 * i + 8 * r, g) for i in range(self.tiles) for r in range(2)], t,
                  self.k_pieces)

    def load_v(self, held, rows):
        """And of V."""
        g, t = tk.lane_id() // 4, tk.lane_id() % 4
        own = [(16 * i + 8 * h + j, 2 * t) for i in range(self.tiles) for h in range(2) for j in range(2)]
        self.load(held, rows.v, rows.there, own, g, self.v_pieces)

    def load(self, held, address, there, rows, part, pieces):
        """rows: (known when compiled, the lane's own) of each. part: the lane's number among a row's."""
        words = sum(p.bytes for p in pieces) // WORD
        mine = there >> rows[0][1]
        for i, (fixed, own) in enumerate(rows):
            at = address_from(address, own + fixed)
            here = mine & Int32(1 << fixed)
            for piece in pieces:
                to = words * i + piece.word
                n = piece.bytes // WORD
                for e, word in enumerate(load_words(at + Int64(part * piece.bytes), piece.first, here,
                                                    [held[to + e] for e in range(n)])):
                    held[to + e] = word

    @cute.jit
    def load_scales(self, g, s, scales, rows):
        """Of this lane's row of K and of V; 0 where there is no row."""
        if const_expr(self.spec.scales == "token"):
            scales[0] = Float32(0.0)
            scales[1] = Float32(0.0)
            if rows.k != Int64(0):
                scales[0] = g.k_descale[rows.page, rows.row, s.head]
                scales[1] = g.v_descale[rows.page, rows.row, s.head]
