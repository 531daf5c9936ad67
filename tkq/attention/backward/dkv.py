"""Flash attention backward (Dao et al., 2022, algorithm 4) on the tile layer: dK, dV, and dQ added up in fp32."""
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, const_expr

import tkq.tile as tk
from tkq.attention.backward.config import BackwardConfig
from tkq.attention.backward.dkv_hdim256 import DkvHdim256
from tkq.attention.backward.dq_atomic import DqAtomic
from tkq.attention.backward.dq_serial import DqSerial
from tkq.attention.backward.math import gradients, probabilities
from tkq.attention.backward.spec import BackwardSpec
from tkq.attention.backward.state import Scalars, State
from tkq.attention.common.operands import BackwardOperands, Gradients, Sequences
from tkq.attention.common.sequences import piece
from tkq.runtime.compile import fake
from tkq.tile import WARPGROUP

DKV_BARRIER, PING_PONG_BARRIER = 1, 3  # one each for each warpgroup with keys


class AttentionBackward(DqAtomic):
    """dV = P' dO, dK = scale * dS' Q, dQ = scale * dS K, with P = exp(scale * Q K' - lse) and
    dS = P * (dO V' - rowsum(o * do) + dlse).

    A task, one for each block or one after the other, is 128 keys of one K/V head; all queries that see them, of all
    its query heads, pass by in tiles. Scores are transposed, (key, query), so that P' and dS' are operands in registers
    as they are.

      producer (warp 0)        K V, then Q dO of one tile after the other
      2 warpgroups (dK, dV)    S' = K Q' | P, dP' = V dO' under it | dV += P' dO, dS under it | dS' to shared memory,
                               dK += dS' Q, with ``overlap_dk`` under the next tile's P | next tile .. | write dK, dV
      1 warpgroup              dQ = dS K | added to the accumulator in global memory | next tile ..
      helper warps (warps 1-3) see ``HelperWarps``

      pipe      stages     full (arrivals)             empty (arrivals)
      Q, stats  stages     producer's bytes (1)        every warp with keys (8)
      dO        stages     producer's bytes (1)        every warp with keys (8)
      dS        ds_stages  every warp with keys (8)    the dQ warpgroup's warps (4)

    The dK/dV warpgroups synchronise at the pipes alone: one's elementwise work overlaps another's wgmma. Adding to dQ,
    whose traffic comes in bursts, holds up its own warpgroup only. S and dP share registers: with both, dK and dV there
    would not be enough; the assembler still begins dP as soon as S has been scaled. ``BackwardPreprocess`` makes the
    statistics of the rows, where rows past the end and rows that see no key have P = 0, so that no query needs a mask;
    without helper warps it zeroes the accumulator, and ``BackwardPostprocess`` makes dQ of it.
    """

    warpgroups = 4

    def roles(self, g, s):
        producer, dq, dkv = self.config.registers
        return (self.first_role(g, s, producer),
                tk.Role(lambda _: self.dq_warpgroup(g, s), dq),
                tk.Role(lambda wg: self.dkv_warpgroup(g, s, wg), dkv, warpgroups=2))

    @cute.jit
    def dkv_warpgroup(self, g, s, wg):
        tile, dim, dtype = self.config.tile, self.spec.width, self.q_tile.dtype
        scores, kv = tk.rt_fl(tile), tk.ring(1)
        c = State(s=scores, dp=scores, p=tk.rt(tile, dtype), ds=tk.rt(tile, dtype), ds_prev=tk.rt(tile, dtype),
                  dk=tk.rt_fl(dim), dv=tk.rt_fl(dim), ring=s.q_pipe.ring(), q_prev=s.q_pipe.ring(),
                  ds_ring=s.ds_pipe.ring(), ping_pong=tk.PingPong(2, wg, self.config.ping_pong, PING_PONG_BARRIER),
                  wg=wg)
        c.ping_pong.start()
        self.each_task(g, s, lambda t, reload_task: self.dkv_task(g, s, t, reload_task, c, kv))

    @cute.jit
    def dkv_task(self, g, s, t, reload_task: Constexpr, c, kv):
        tk.zero(c.dk)
        tk.zero(c.dv)
        for i in cutlass.range_constexpr(2):
            tk.wait(s.kv_full[i], kv.phase)
        if const_expr(self.config.overlap_dk):
            tk.zero(c.ds_prev)
            c.q_prev.count[0] = c.ring.count[0]
        self.visit(g, s, t, c, self.step)
        if const_expr(self.config.overlap_dk):
            self.last_dk(s, c)
        for i in cutlass.range_constexpr(2):
            self.release_kv(s, i)
        self.next_kv(kv)
        self.finish(g, s, reload_task(), c)

    def step(self, *args):
        return (self.overlapped_step if self.config.overlap_dk else self.plain_step)(*args)

    @cute.jit
    def plain_step(self, g, s, t, c, m, masked: Constexpr[bool]):
        s.q_pipe.wait(c.ring)
        c.ping_pong.take()
        tk.mm_ABt(c.s, s.k[c.wg], s.q[c.ring.stage])
        tk.mma_wait(0)
        self.make_p(g, s, t, c, m, masked)
        c.ping_pong.give()
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
    def overlapped_step(self, g, s, t, c, m, masked: Constexpr[bool]):
        """As ``plain_step``, but dK of the tile before runs under P. At the first tile there is none: its dS is 0, and
        its Q the first."""
        s.q_pipe.wait(c.ring)
        c.ping_pong.take()
        tk.mm_ABt(c.s, s.k[c.wg], s.q[c.ring.stage])
        tk.mma_AB(c.dk, c.ds_prev, s.q[c.q_prev.stage])
        tk.mma_wait(1)  # S
        self.make_p(g, s, t, c, m, masked)
        c.ping_pong.give()
        tk.mma_wait(0)  # dK
        self.release_q_prev(s, c)
        s.do_pipe.wait(c.ring)
        self.multiply_dp(s, c)
        tk.mma_AB(c.dv, c.p, s.do[c.ring.stage])
        tk.mma_wait(1)  # dP
        self.make_ds(s, c)
        if const_expr(self.spec.adds_dq):
            self.hand_over(s, c)
            c.ds_ring.advance()
        tk.mma_wait(0)  # dV
        self.save_ds(g, c)
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

    def save_ds(self, g, c):
        """ds_prev = dS. An operand that comes round a loop must be written while no product runs, or the assembler lets
        none run under anything else; a copy it would see through, so a 0 that it does not know enters."""
        to, x = (cute.recast_tensor(tile.tensor, Int32) for tile in (c.ds_prev, c.ds))
        for i in range(cute.size(x)):
            to[i] = x[i] ^ (g.heads >> 31)

    @cute.jit
    def release_q_prev(self, s, c):
        """Of the tile before, if there is one."""
        if c.q_prev.count[0] != c.ring.count[0]:
            s.q_pipe.release(c.q_prev)
            c.q_prev.advance()

    @cute.jit
    def last_dk(self, s, c):
        """dK of the last tile."""
        if c.q_prev.count[0] != c.ring.count[0]:
            tk.mma_AB(c.dk, c.ds_prev, s.q[c.q_prev.stage])
            tk.mma_wait(0)
            s.q_pipe.release(c.q_prev)

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
        barrier, number = DKV_BARRIER + c.wg, 2 * t.block + c.wg
        at = t.batch_k, t.head, number, 0
        if const_expr(self.config.store_from_registers):
            self.write_both(g, t, c, number)
        else:
            tk.sync(barrier, WARPGROUP)  # V has been read
            self.send(piece(g.layout, g.dv, t.rows_k), s.v[c.wg], c.dv, at, barrier)
            tk.mul(c.dk, c.dk, g.scale)
            if const_expr(self.spec.adds_dq):
                self.wait_for_dq(s, c)
            self.send(piece(g.layout, g.dk, t.rows_k), s.k[c.wg], c.dk, at, barrier)
        tk.store_wait()

    def write_both(self, g, t, c, number):
        self.write(g, g.dv, c.dv, t, number)
        tk.mul(c.dk, c.dk, g.scale)
        self.write(g, g.dk, c.dk, t, number)


class DqSerialBackward(DqSerial, AttentionBackward):
    """With dQ that goes from block to block."""


def _kind(spec, config):
    return DqSerialBackward if config.dq_serial else DkvHdim256 if spec.width > 128 else AttentionBackward


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
    sequences = Sequences(ints(Bp), ints(Bp), ints(B, spec.seqused_q), ints(B, spec.seqused_k)) if spec.varlen else None
    return _kind(spec, config)(spec, config), (
        BackwardOperands(do, q, k, v, o, rows(), rows() if spec.dlse else None),
        Gradients(dq if spec.dq else None, dk, dv), fake.tensor("fp32", (fake.sym64(),)), sequences,
        Scalars(Float32(1.0), Float32(0.0), Int32(0), Int32(0), Int32(1)))
