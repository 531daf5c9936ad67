"""The state of the features' kernel: the part that takes up chunks, and adds up the map's gradient."""
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

import tkq.tile as tk
from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.hedgehog.column_sums import lane_column, warp_columns
from tkq.linear_attention.hedgehog.config import WARPS
from tkq.linear_attention.hedgehog.feature_tiles import FEATURES, SIDES, near_power, visited
from tkq.linear_attention.hedgehog.features import LEAST, softmax
from tkq.linear_attention.hedgehog.spec import FeatureSpec

STATE_BARRIER = 1  # the named barrier of the first side's warpgroup; the other has the next


@dataclass(frozen=True)
class State:
    """Registers of one side's 64 features."""

    sum: tk.RegTile  # features by D
    dmap: tk.RegTile  # the map's gradient, transposed: its columns by half of D
    e: tk.RegTile
    row: tk.RowVec
    weight: tk.RowVec
    delta: tk.RowVec
    total: cute.Tensor  # of a feature of the first 64 threads each: the sum over tokens


class FeatureState:
    """One side's 64 features by D, from the first chunk that is visited to the last."""

    def __init__(self, spec: FeatureSpec):
        self.spec, self.keys = spec, spec.of == "keys"

    @cute.jit
    def run(self, g, s, t, side):
        D = self.spec.head_dim
        c = State(tk.rt_fl(D), tk.rt_fl(D // 2), tk.rt_fl(FEATURES), tk.rv(), tk.rv(), tk.rv(),
                  cute.make_rmem_tensor((1,), Float32))
        tk.zero(c.sum)
        tk.zero(c.dmap)
        c.total[0] = Float32(0.0)
        less, _ = near_power(self.spec, g, t)
        scale = g.linear[t.head] * less
        states, before = s.states.ring(), s.tokens.ring()
        one = tk.Ring(before.count, 1)  # of the chunk before, in pipes of a stage
        s.map_pipe.wait(s.map_pipe.ring())
        self.put_state(s, c, side, states, 0)
        for i in cutlass.range(1, t.chunks, unroll=1):
            self.put_state(s, c, side, states, i)
            self.add_others(g, s, t, c, side, (before, one), i - 1, scale)
            before.advance()
        self.begin_map(s, c, side, (before, one))
        tk.mma_wait(0)
        _, power = near_power(self.spec, g, t)  # once more: a register less in the loop
        tk.mul(c.dmap, c.dmap, power)
        of_head = g.dmap[t.batch, t.head, None, None]
        transposed = cute.make_tensor(of_head.iterator, cute.select(of_head.layout, [1, 0]))
        tk.store_elements(transposed, c.dmap, 0, side * (D // 2))

    @cute.jit
    def put_state(self, s, c, side, states, i):
        """What chunk i has of those before: of all up to i - 2."""
        sums, total = s.sums, c.total
        s.states.acquire_empty(states)
        tk.store(s.state[side], c.sum)
        if tk.thread_in_warpgroup() < FEATURES:
            sums[tk.thread_in_warpgroup(), i % 2 * SIDES + side] = total[0]
        tk.publish()
        s.states.commit(states)
        states.advance()

    def begin_map(self, s, c, side, rings):
        """Of the map's gradient half of the rows, which the chunk before has."""
        tokens, dys = rings
        s.tokens.wait(tokens)
        s.dys.wait(dys)
        tk.mma_AtB(c.dmap, s.dy[0], s.x[tokens.stage], b_part=side)

    @cute.jit
    def add_others(self, g, s, t, c, side, rings, i, scale):
        """Of chunk i, with its part of the map's gradient, which is added behind what features begin with."""
        (values, others), parts, total = rings, s.parts, c.total
        self.ask(g, t, c, visited(self.spec, t, i))
        s.others.wait(others)
        tk.mm_AB(c.e, s.y[others.stage], s.maps[1])
        self.begin_map(s, c, side, rings)
        tk.mma_wait(1)
        s.others.release(others)
        if side == 0:
            softmax(c.e, c.row, c.e, 1.0)
        else:
            softmax(c.e, c.row, c.e, -1.0)
        tk.apply(c.e, lambda z: cutlass.select_(z < LEAST, Float32(LEAST), z), c.e)
        tk.mma_wait(0)
        s.dys.release(others)  # in pipes of a stage
        s.tokens.release(values)
        if const_expr(self.keys):
            tk.mul(c.weight, c.weight, scale)
            tk.mul_row(c.e, c.e, c.weight)
        self.put_features(s, c, side)
        tk.publish()
        tk.sync(STATE_BARRIER + side, tk.WARPGROUP)
        if tk.thread_in_warpgroup() < FEATURES:
            for warp in cutlass.range_constexpr(WARPS):
                total[0] = total[0] + parts[tk.thread_in_warpgroup(), WARPS * side + warp]
        s.values.wait(values)
        tk.mma_AtB(c.sum, s.of_y[side], s.b[values.stage])
        tk.mma_wait(0)
        s.values.release(values)
        tk.sync(STATE_BARRIER + side, tk.WARPGROUP)  # features and parts have been read

    def ask(self, g, t, c, chunk):
        """Rows' numbers: weight is 0 past the last token, delta what their features are summed up with."""
        if not self.keys:
            tk.fill(c.delta, 1.0)
            return
        for to, x in ((c.weight, g.inverse), (c.delta, g.delta)):
            tk.load_rows(to, x[t.batch, None, t.head], chunk * CHUNK, g.tokens)
        for r in range(2):
            there = chunk * CHUNK + tk.first_row() + 8 * r < g.tokens
            c.weight.tensor[r] = cutlass.select_(there, c.weight.tensor[r], Float32(0.0))

    def put_features(self, s, c, side):
        tk.store(s.of_y[side], c.e)
        for n, found in enumerate(warp_columns(c.e, c.delta)):
            s.parts[lane_column() + n, WARPS * side + tk.warp_id() % WARPS] = found
