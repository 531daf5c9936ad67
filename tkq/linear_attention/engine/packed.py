"""Where a block's sequence and its states lie: in a batch, in packed sequences, in a pool. The part of
`LinearAttention` that knows of `cu_seqlens` and `state_indices`."""
from dataclasses import replace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

import tkq.tile as tk
from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.spec import LinearSpec
from tkq.runtime.compile import fake

WARP = 32


class Piece(NamedTuple):
    """Tokens first .. end of one sequence. rows: how many of them are read: none where they are of no sequence, so that
    what is computed is 0. state: the row of its states, outside of them where it has none."""

    first: Any
    end: Any
    rows: Any
    state: Any


class Sequences:
    """A block finds its sequence; from there on its tensors begin with the sequence's first token. The roles know
    nothing of it.

    Sequence n of packed ones has the tokens from the largest of cu[0] .. cu[n] to the largest of cu[0] .. cu[n + 1],
    each within 0 .. S: whatever cu holds, no token has two sequences, and none lies outside. Two more blocks of each
    head have the tokens behind the last sequence and those before the first: their outputs are 0.

    Tokens are read and written by TMA, whose descriptors end where a sequence does (`tk.ragged`): the last chunk of a
    sequence sees zeros behind it, and not the tokens of the next one, in any order."""

    def __init__(self, spec: LinearSpec):
        self.packed, self.pool = spec.packed, spec.pool
        self.order = [1, 3, 2] if spec.packed else [1, 3, 2, 0]  # of (batch, token, head, col)

    # ---- host ----------------------------------------------------------------------------------

    def rows(self, x: cute.Tensor) -> cute.Tensor:
        """x (batch, token, head, col) as (token, col, head [, batch])."""
        return cute.make_tensor(x.iterator, cute.select(x.layout, self.order))

    def loads(self, x: cute.Tensor, tile: tk.st) -> tk.gl:
        """Of `rows`."""
        return tk.gl.load(tk.ragged(x) if self.packed else x, tile)

    def stores(self, x: cute.Tensor, tile: tk.st) -> tk.gl:
        """Likewise."""
        return tk.gl.store(tk.ragged_store(x) if self.packed else x, tile)

    def blocks(self, q: cute.Tensor, cu: Any) -> Any:
        """How many for each head and part of V."""
        return cu.shape[0] + 1 if self.packed else q.shape[0]

    # ---- device --------------------------------------------------------------------------------

    def of_block(self, g, n):
        """(g as the n-th block's sequence has it, TMA's batch coordinate, the state's row, how many tokens are
        written)."""
        if not self.packed and not self.pool:
            return g, n, n, g.tokens
        piece = self.find(g, n)
        if not self.packed:
            return g, n, piece.state, g.tokens
        return placed(g, piece), piece.end, piece.state, piece.end - piece.first

    @cute.jit
    def state(self, x: cute.Tensor, t):
        """V by K, of states x (row, head, k, v): the task's. One without an element, of which nothing is read or
        written, where no such row is."""
        if const_expr(self.packed is None and not self.pool):
            of_head = x[t.state, t.head, None, None]
            return cute.make_tensor(of_head.iterator, cute.select(of_head.layout, [1, 0]))
        rows, _, K, V = x.shape
        of_row, of_head, of_k, of_v = x.stride
        there = (t.state >= 0) & (t.state < rows)
        row, V = cutlass.select_(there, t.state, 0), cutlass.select_(there, Int32(V), 0)
        at = x.iterator + (Int64(row) * of_row + Int64(t.head) * of_head)
        return cute.make_tensor(at, cute.make_layout((V, K), stride=(of_v, of_k)))

    @cute.jit
    def find(self, g, n):
        first, end, rows, state = Int32(0), g.tokens, g.tokens, n
        if const_expr(self.packed is not None):
            count = cute.size(g.cu) - 1
            first, end = self.bounds(g, n, count)
            rows = Int32(0) if n >= count else end - first
            state = Int32(-1) if n >= count else n
        if const_expr(self.pool is not None):
            state = Int32(-1)
            if n < cute.size(g.state_indices):
                state = self.row(g.state_indices[n])
        return Piece(*[cute.arch.make_warp_uniform(x) for x in (first, end, rows, state)])

    @cute.jit
    def bounds(self, g, n, count):
        """(first, end) of piece n: of ``count`` sequences, or what is behind the last one, or before the first. Each
        warp for itself."""
        last, first = cutlass.min(n, count), Int32(0)
        for base in cutlass.range(0, last + 1, WARP, unroll=4):
            first = cutlass.max(first, self.cut(g, cutlass.min(base + tk.lane_id(), last)))
        first = cute.arch.warp_redux_sync(first, "max")
        end = cutlass.max(first, self.cut(g, cutlass.min(n + 1, count)))
        if n == count:
            end = g.tokens
        if n > count:
            first, end = Int32(0), self.cut(g, 0)
        return first, end

    def row(self, index):
        """A state's index as 32 bits: what is no row stays none."""
        if self.pool == "int64":
            return Int32(cutlass.max(cutlass.min(index, (1 << 31) - 1), -1))
        return index

    def cut(self, g, i):
        """cu[i], within the tokens."""
        tokens = Int64(g.tokens) if self.packed == "int64" else g.tokens
        return Int32(cutlass.max(cutlass.min(g.cu[i], tokens), 0))


def placed(g, piece: Piece):
    """g, a kernel's tensors and sizes, as a piece's tokens have it: those of its fields that there are, and of its
    ``own``, which only one package has."""
    first, written, found, own = piece.first, piece.end - piece.first, {}, {}
    for names, of in ((("q", "k", "v", "x", "q2", "k2", "v2", "inverse", "less", "second", "rest"),
                       lambda x: x.part(piece.rows)),
                      (("o", "dv", "of_x", "o2", "kept"),
                       lambda x: x.part(written) if isinstance(x, tk.gl) else _tokens(x, first)),
                      (("g", "beta"), lambda x: _tokens(x, first)),
                      (("dots",), lambda x: _tokens(x, first, 1)),
                      (("checkpoints",), lambda x: _tokens(x, first // (CHUNK * g.every))),
                      (("ssd",), lambda x: x._replace(dt=_tokens(x.dt, first), diagonal=_tokens(x.diagonal, first)))):
        for fields, to in ((g, found), (getattr(g, "own", None), own)):
            there = {name: getattr(fields, name, None) for name in names}
            to.update({name: of(x) for name, x in there.items() if x is not None})
    if own:
        found["own"] = g.own._replace(**own)
    return replace(g, tokens=piece.rows, **found)


def any_strides(dtype, shape):
    """A tensor for the compiler; None without a dtype."""
    strides = tuple(fake.sym64() for _ in shape)
    return dtype and fake.tensor(dtype, shape, strides, align=4 if dtype == "fp32" else 2)


def numbers(dtype):
    """Of sequences, for the compiler; None without a dtype."""
    return dtype and fake.tensor(dtype, (fake.sym(),), align=8 if dtype == "int64" else 4)


def _tokens(x, first, batch=0):
    """x from token ``first`` on, the same for each batch coordinate, which is its dimension ``batch``, before that of
    tokens; a tensor of no tokens as it is."""
    if x is None or cute.rank(x) < batch + 2:
        return x
    strides = list(x.stride)
    strides[batch] = 0
    at = x.iterator + Int64(first) * strides[batch + 1]
    return cute.make_tensor(at, cute.make_layout(x.shape, stride=tuple(strides)))
