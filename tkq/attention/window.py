"""Flash attention forward with a window on both sides: blocks that go through the keys of a head once."""
from dataclasses import dataclass

import cutlass
from cutlass import Constexpr, Int32, const_expr

import tkq.tile as tk
from tkq.attention import forward
from tkq.attention.ranges import Extent, ceil_div, even_section
from tkq.attention.spec import AttentionSpec
from tkq.attention.state import Shared
from tkq.attention.window_config import WindowConfig
from tkq.attention.window_consumer import WindowConsumer
from tkq.attention.window_producer import WindowProducer, window_fields
from tkq.attention.window_ranges import ROWS, TILE, Strip, bands_of, place, segments_of, span_of


@dataclass(frozen=True)
class Strips:
    """Sequences of one length, in strips: see ``window_ranges``."""

    rows_q: Int32
    rows_k: Int32
    heads: Int32  # of a batch element
    heads_per_kv: Int32
    all_heads: Int32  # of all batch elements
    span: Int32
    segments: Int32
    section: Int32  # how many heads are worked on together
    shift: Constexpr[int]

    def begin(self, schedule):
        """As ``Dense``."""
        return self, schedule

    def find(self, number) -> Strip:
        return place(number, self.span, self.segments, self.all_heads, self.section, self.shift, self.rows_q)

    def lengths(self, task):
        return self.rows_q, self.rows_k


class WindowForward(forward.AttentionForward):
    """``AttentionForward`` of rows that see a number of keys on either side: o, and lse where it is asked for.

    There, both warpgroups begin and end a task at once, and tensor cores wait while they do; and both see 128 rows'
    keys. Here a block goes through a strip of key tiles, each warpgroup with 64 rows at a time that see some of them;
    where its rows see no more, the next 64 begin, while the other warpgroup is in the middle of its own.

      key tiles          t t-1 t-2 t-3 .. (each is waited for and released by both warpgroups, seen or not)
      warpgroup 1        [rows r            ] [rows r - 128 span     ] [..     span tiles each
      warpgroup 0            [rows r'             ] [rows r' - 128 span    ]    ``shift`` tiles behind, or ahead

      producer (warp 0)  K(t) | both rows' tasks and Q | K(t-1) V(t) | K(t-2) V(t-1) | .. when both have begun those,
                         the next rows' tasks and Q .. | next strip | V(last)
      consumer           first S | S, and P V of the tile before | .. | the last P V, and over it the next rows' first S
                         (``bridge``) | write O

    Pipes are those of ``AttentionForward``. Without ``turns``: the two are not in step.
    """

    def __init__(self, spec: AttentionSpec, config: WindowConfig):
        if spec.varlen or spec.pack > 1 or not spec.far or not (spec.causal or spec.right):
            raise ValueError(f"WindowForward: {spec}, needed are limits far left and right, one length, no packing")
        super().__init__(spec, config.check(spec.head_dim, spec.head_dim_v))
        self.producer, self.consumer = WindowProducer(spec, config), WindowConsumer(spec, config)

    def tasks(self, q, k, sequences, numbers):
        """(what knows the strips, how many there are)"""
        heads, all_heads = q.shape[2], q.shape[2] * q.shape[3]
        right = numbers.right if const_expr(self.spec.right) else Int32(0)
        e = Extent(Int32(q.shape[0]), Int32(k.shape[0]), ROWS, TILE, numbers.left, right)
        span = span_of(e)
        segments = segments_of(q.shape[0], span)
        heads_per_kv = heads // k.shape[2]
        section = ceil_div(ceil_div(numbers.processors, span) + 1, heads_per_kv) * heads_per_kv
        section = even_section(cutlass.min(section, all_heads), heads_per_kv, all_heads)
        strips = Strips(q.shape[0], k.shape[0], heads, heads_per_kv, all_heads, span, segments, section,
                        self.config.shift)
        return strips, bands_of(segments) * span * all_heads

    def shared(self, al: tk.SharedAllocator) -> Shared:
        c, tiles = self.config, self.tiles
        n, releases = c.consumers * c.q_stages, 4 * c.consumers
        q = al.tile(tiles.q, n)
        o = q if c.o_direct else al.tile(tiles.o, c.consumers)
        k, v = al.tile(tiles.k, c.stages), al.tile(tiles.v, c.stages + c.more_v)
        task = al.vector(len(window_fields(self.spec)), n, Int32)
        q_full, q_empty = al.semaphores(n), al.semaphores(n)
        k_pipe, v_pipe = [al.pipe(x.stages, x.type.bytes, releases) for x in (k, v)]
        return Shared(q, o, k, v, task, q_full, q_empty, k_pipe, v_pipe, None)


def build(spec: AttentionSpec, config: WindowConfig):
    """As ``forward.build``."""
    return WindowForward(spec, config), forward.build(spec, config)[1]
