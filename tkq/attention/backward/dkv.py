"""Flash attention backward (Dao et al., 2022, algorithm 4) on the tile layer: dK, dV, and dQ added up in fp32."""
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, const_expr

import tkq.tile as tk
from tkq.attention.backward.config import BackwardConfig
from tkq.attention.backward.dkv_hdim256 import WideBackward
from tkq.attention.backward.dq_atomic import BackwardAdding
from tkq.attention.backward.dq_serial import Chained
from tkq.attention.backward.math import gradients, probabilities
from tkq.attention.backward.spec import BackwardSpec
from tkq.attention.backward.state import Numbers, State
from tkq.attention.common.operands import BackwardOperands, Gradients, Sequences
from tkq.attention.common.sequences import piece
from tkq.runtime.compile import fake
from tkq.tile import WARPGROUP

KEYS_BARRIER, TURNS_BARRIER = 1, 3  # one each for each warpgroup with keys


class AttentionBackward(BackwardAdding):
    """dV = P' dO, dK = scale * dS' Q, dQ = scale * dS K, with P = exp(scale * Q K' - lse) and
    dS = P * (dO V' - rowsum(o * do) + dlse).

    A task, one for each block or one after the other, is 128 keys of one K/V head; all queries that see them, of all
    its query heads, pass by in tiles. Scores are transposed, (key, query), so that P' and dS' are operands in registers
    as they are.

      producer (warp 0)        K V, then Q dO of one tile after the other
      2 warpgroups, 64 keys    S' = K Q' | P, dP' = V dO' under it | dV += P' dO, dS under it | dS' to shared memory,
                               dK += dS' Q, with ``late`` under the next tile's P | next tile .. | write dK, dV
      1 warpgroup              dQ = dS K | added to the accumulator in global memory | next tile ..
      background (warps 1-3)   see ``BackwardBackground``

      pipe      stages     full (arrivals)             empty (arrivals)
      Q, stats  stages     producer's bytes (1)        every warp with keys (8)
      dO        stages     producer's bytes (1)        every warp with keys (8)
      dS        ds_stages  every warp with keys (8)    the dQ warpgroup's warps (4)

    The warpgroups with keys meet nobody but at the pipes: one's elementwise work runs under another's products. Adding
    to dQ, whose traffic comes in bursts, holds up its own warpgroup only. S and dP share registers: with both, dK and
    dV there would not be enough; the assembler still begins dP as soon as S has been scaled. ``BackwardPre`` makes the
    statistics of the rows, where rows past the end and rows that see no key have P = 0, so that no query needs a mask;
    without background it zeroes the accumulator, and ``BackwardPost`` makes dQ of it.
    """

    warpgroups = 4

    def roles(self, g, s):
        producer, queries, keys = self.config.registers
        return (self.first_role(g, s, producer),
                tk.Role(lambda _: self.queries(g, s), queries),
                tk.Role(lambda wg: self.keys(g, s, wg), keys, warpgroups=2))

    @cute.jit
    def keys(self, g, s, wg):
        tile, dim, dtype = self.config.tile, self.spec.width, self.q_tile.dtype
        scores, kv = tk.rt_fl(tile), tk.ring(1)
        c = State(s=scores, dp=scores, p=tk.rt(tile, dtype), ds=tk.rt(tile, dtype), kept=tk.rt(tile, dtype),
                  dk=tk.rt_fl(dim), dv=tk.rt_fl(dim), ring=s.q_pipe.ring(), before=s.q_pipe.ring(),
                  ds_ring=s.ds_pipe.ring(), turns=tk.Turns(2, wg, self.config.turns, TURNS_BARRIER), wg=wg)
        c.turns.start()
        self.each_task(g, s, lambda t, again: self.keys_task(g, s, t, again, c, kv))

    @cute.jit
    def keys_task(self, g, s, t, again: Constexpr, c, kv):
        tk.zero(c.dk)
        tk.zero(c.dv)
        for i in cutlass.range_constexpr(2):
            tk.wait(s.kv_full[i], kv.phase)
        if const_expr(self.config.late):
            tk.zero(c.kept)
            c.before.count[0] = c.ring.count[0]
        self.visit(g, s, t, c, self.step)
        if const_expr(self.config.late):
            self.last_keys(s, c)
        for i in cutlass.range_constexpr(2):
            self.done_with(s, i)
        self.next_keys(kv)
        self.finish(g, s, again(), c)

    def step(self, *args):
        return (self.late_step if self.config.late else self.whole_step)(*args)

    @cute.jit
    def whole_step(self, g, s, t, c, m, masked: Constexpr[bool]):
        s.q_pipe.wait(c.ring)
        c.turns.take()
        tk.mm_ABt(c.s, s.k[c.wg], s.q[c.ring.stage])
        tk.mma_wait(0)
        self.make_p(g, s, t, c, m, masked)
        c.turns.give()
        s.do_pipe.wait(c.ring)
        self.multiply_dp(s, c)
        tk.mma_AB(c.dv, c.p, s.do[c.ring.stage])
        tk.mma_wait(1)  # dP
        self.make_ds(s, c)
        if const_expr(self.spec.adds_dq):
            self.hand_over(s, c)
            c.ds_ring.advance()
        tk.mma_AB(c.dk, c.ds, s.q[c.ring.stage])
        tk.mma_wait(1)  # dV
        s.do_pipe.release(c.ring)
        tk.mma_wait(0)
        s.q_pipe.release(c.ring)
        c.ring.advance()

    @cute.jit
    def late_step(self, g, s, t, c, m, masked: Constexpr[bool]):
        """As ``whole_step``, but dK of the tile before runs under P. At the first tile there is none: its dS is 0, and
        its Q the first."""
        s.q_pipe.wait(c.ring)
        c.turns.take()
        tk.mm_ABt(c.s, s.k[c.wg], s.q[c.ring.stage])
        tk.mma_AB(c.dk, c.kept, s.q[c.before.stage])
        tk.mma_wait(1)  # S
        self.make_p(g, s, t, c, m, masked)
        c.turns.give()
        tk.mma_wait(0)  # dK
        self.done_with_queries(s, c)
        s.do_pipe.wait(c.ring)
        self.multiply_dp(s, c)
        tk.mma_AB(c.dv, c.p, s.do[c.ring.stage])
        tk.mma_wait(1)  # dP
        self.make_ds(s, c)
        if const_expr(self.spec.adds_dq):
            self.hand_over(s, c)
            c.ds_ring.advance()
        tk.mma_wait(0)  # dV
        self.keep(g, c)
        s.do_pipe.release(c.ring)
        c.ring.advance()

    def make_p(self, g, s, t, c, m, masked):
        limits = self.limits(g, t, m, c.wg) if masked else ()
        probabilities(c.p, self.slope(c), c.s, self.stats(s, c.ring, 0), g.scores, limits)

    def multiply_dp(self, s, c):
        tk.mm_ABt(c.dp, s.v[c.wg], s.do[c.ring.stage])

    def make_ds(self, s, c):
        gradients(c.ds, self.slope(c), c.dp, self.stats(s, c.ring, 1))

    def slope(self, c):
        """Of ``probabilities``: in registers that are there."""
        return c.ds if self.spec.softcap else c.p

    def keep(self, g, c):
        """kept = dS. An operand that comes round a loop must be written while no product runs, or the assembler lets
        none run under anything else; a copy it would see through, so a 0 that it does not know enters."""
        to, x = (cute.recast_tensor(tile.tensor, Int32) for tile in (c.kept, c.ds))
        for i in range(cute.size(x)):
            to[i] = x[i] ^ (g.heads >> 31)

    @cute.jit
    def done_with_queries(self, s, c):
        """Of the tile before, if there is one."""
        if c.before.count[0] != c.ring.count[0]:
            s.q_pipe.release(c.before)
            c.before.advance()

    @cute.jit
    def last_keys(self, s, c):
        """dK of the last tile."""
        if c.before.count[0] != c.ring.count[0]:
            tk.mma_AB(c.dk, c.kept, s.q[c.before.stage])
            tk.mma_wait(0)
            s.q_pipe.release(c.before)

    def hand_over(self, s, c):
        """dS, to the warpgroup that makes dQ."""
        s.ds_pipe.acquire_empty(c.ds_ring)
        tk.store(s.ds[2 * c.ds_ring.stage + c.wg], c.ds)
        tk.publish()
        s.ds_pipe.commit(c.ds_ring)

    def wait_for_dq(self, s, c):
        """Until the warpgroup that makes dQ has read K for the last time."""
        self.acquire_after(s.ds_pipe, c.ds_ring)

    @cute.jit
    def finish(self, g, s, t, c):
        """Write dK and dV: from registers, or by way of the shared memory of K and V."""
        barrier, number = KEYS_BARRIER + c.wg, 2 * t.block + c.wg
        at = t.batch_k, t.head, number, 0
        if const_expr(self.config.direct):
            self.write_both(g, t, c, number)
        else:
            tk.sync(barrier, WARPGROUP)  # V has been read
            self.send(piece(g.places, g.dv, t.rows_k), s.v[c.wg], c.dv, at, barrier)
            tk.mul(c.dk, c.dk, g.scale)
            if const_expr(self.spec.adds_dq):
                self.wait_for_dq(s, c)
            self.send(piece(g.places, g.dk, t.rows_k), s.k[c.wg], c.dk, at, barrier)
        tk.store_wait()

    def write_both(self, g, t, c, number):
        self.write(g, g.dv, c.dv, t, number)
        tk.mul(c.dk, c.dk, g.scale)
        self.write(g, g.dk, c.dk, t, number)


class ChainedBackward(Chained, AttentionBackward):
    """With dQ that goes from block to block."""


def _kind(spec, config):
    return ChainedBackward if config.chain else WideBackward if spec.width > 128 else AttentionBackward


def build(spec: BackwardSpec, config: BackwardConfig):
    """The kernels and their fake arguments: any B, Sq, Sk, H, Hk, D and Dv up to the width, and strides that are
    multiples of 16 bytes."""
    B, Bp, Sq, Sk, H, Hk = (fake.sym() for _ in range(6))
    D, Dv = (fake.sym(divisibility=8) for _ in range(2))
    batch = () if spec.varlen else (B,)

    def operand(seqlen, heads, cols):
        shape = *batch, seqlen, heads, cols
        return fake.tensor(spec.dtype, shape, (*(fake.sym64(divisibility=8) for _ in shape[1:]), 1), align=16)

    def rows():
        shape = *batch, H, Sq
        return fake.tensor("fp32", shape, tuple(fake.sym64() for _ in shape), align=4)

    def ints(n, there=True):
        return fake.tensor("int32", (n,), align=4) if there else None

    q, dq, o, do = (operand(Sq, H, cols) for cols in (D, D, Dv, Dv))
    k, dk, v, dv = (operand(Sk, Hk, cols) for cols in (D, D, Dv, Dv))
    sequences = Sequences(ints(Bp), ints(Bp), ints(B, spec.used_q), ints(B, spec.used_k)) if spec.varlen else None
    return _kind(spec, config)(spec, config), (
        BackwardOperands(do, q, k, v, o, rows(), rows() if spec.dlse else None),
        Gradients(dq if spec.dq else None, dk, dv), fake.tensor("fp32", (fake.sym64(),)), sequences,
        Numbers(Float32(1.0), Float32(0.0), Int32(0), Int32(0), Int32(1)))
