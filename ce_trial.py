"""Scratch: other ways of cross entropy's forward for short rows (one warp, or two, to a row). See ce_time.py."""
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64, Uint32, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import CopyG2ROp, LoadCacheMode, cpasync
from cutlass.cutlass_dsl import T, dsl_user_op

from tkq import tile as tk
from tkq.losses import build as shipped
from tkq.losses.forward import CrossEntropy
from tkq.row_pass import Row
from tkq.row_plan import RowConfig
from tkq.softmax.online import finite, log
from tkq.utils import warp_reduce, widened

LOG2E, LN2 = 1.4426950408889634, 0.6931471805599453


@dataclass(frozen=True)
class Trial(RowConfig):
    """early: the target is on its way before the row is, and stays there (the compiler moves that load behind the row's
    arrival). lean: fewer instructions an element. pdl: 1: launched under the end of the kernel before; 2: and lets the
    next one in. past: loads go past L1. bulk: each warp's row by one bulk copy. pick: the target's logit comes from
    shared memory. least: blocks for which there are to be registers. fill: bytes of shared memory nobody uses.
    """

    early: bool = True
    lean: bool = False
    pdl: int = 0
    past: bool = False
    bulk: bool = False
    pick: bool = False
    least: int = 0
    fill: int = 0


@dsl_user_op
def max2(a, b, *, loc=None, ip=None):
    """The larger ones of two pairs of bf16; NaN where one is."""
    return Uint32(llvm.inline_asm(T.i32(), [Uint32(a).ir_value(loc=loc, ip=ip), Uint32(b).ir_value(loc=loc, ip=ip)],
                                  "max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", has_side_effects=False, is_align_stack=False,
                                  asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip))


@dsl_user_op
def fma(a, b, c, *, loc=None, ip=None):
    args = [Float32(x).ir_value(loc=loc, ip=ip) for x in (a, b, c)]
    return Float32(llvm.inline_asm(T.f32(), args, "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", has_side_effects=False,
                                   is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip))


class TrialCE(CrossEntropy):
    """No smoothing, no class weights, no softcap; one block to a row."""

    def _launch_shape(self, rows):
        c = self.config
        more = dict(min_blocks_per_mp=c.least, preferred_smem_carveout=8) if c.least else {}
        if c.pdl:
            more["use_pdl"] = True
        return {**super()._launch_shape(rows), **more}

    def _past_l1(self):
        return self.config.past

    def _load_atom(self, m):
        if self.config.load == "registers" and self.config.past:
            op = CopyG2ROp()
            return cute.make_copy_atom(op, m.element_type, num_bits_per_copy=128,
                                       l1c_evict_priority=cute.nvgpu.CacheEvictionPriority.NO_ALLOCATE)
        return super()._load_atom(m)

    # ---- rows by bulk copies, or by cp.async to where any lane of the row finds them ------------------------------

    def _fetch_row(self, m, coord, inside, smem, tidx):
        t = self.tile
        if self.config.fill:
            smem.allocate_array(Int32, self.config.fill // 4, byte_alignment=16)
        if self.config.load != "shared":
            return super()._fetch_row(m, coord, inside, smem, tidx)
        rows = smem.allocate_tensor(m.element_type, cute.make_layout(t.rows * t.cols), byte_alignment=128)
        mine = tidx // t.threads_per_row * t.cols  # where this thread's row begins
        self._kept = rows, mine
        layout = cute.make_layout((t.vector, t.blocks), stride=(1, t.vector * t.threads_per_row))
        at = rows.iterator + mine + coord[1]
        held = cute.make_tensor(at.align(16), layout)
        source = self._view(m, coord)
        if self.config.bulk:
            self._sem = tk.Semaphore(smem.allocate_array(cutlass.Int64, t.rows, 8))[tidx // t.threads_per_row]
            first = self._view(m, (coord[0], Int32(0)))
            self._start((rows.iterator + mine).toint(), first.iterator.toint(), self._sem, tidx)
        else:
            for j in range(t.blocks):
                self._fetch(self._load_atom(m), source[None, j], held[None, j], inside[j])
        return held

    @cute.jit
    def _start(self, dst, src, sem: Constexpr, tidx):
        if tidx % 32 == 0:
            bytes = const_expr(self.N * self.dtype.width // 8)
            cute.arch.mbarrier_init(sem.ptr, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.mbarrier_arrive_and_expect_tx(sem.ptr, bytes)
            tk.bulk_load(dst, src, bytes, sem.ptr.toint())

    def _landed(self):
        c = self.config
        if c.bulk:
            cute.arch.sync_warp()
            tk.wait(self._sem, 0)
        else:
            super()._landed()
            if c.load == "shared":
                cute.arch.sync_warp()

    # ---- one thread's -----------------------------------------------------------------------------------------------

    def work(self, here, mX, mT, mW, mLoss, mSaved, mAll, mD, o):
        from tkq.losses.rows import Kept

        c = self.config
        if c.pdl:
            cute.arch.griddepcontrol_wait()
        if c.pdl == 2:
            cute.arch.griddepcontrol_launch_dependents()
        place, kept = self._place(here, mX), Kept.of(mSaved, mAll, mX.shape[0])
        target = self.target(mT, mW, place.there, o)
        if c.early and c.load == "registers":
            cute.arch.sync_warp()  # or ptxas moves the load of the target behind the row's arrival
        row = self._row(mX, place)
        self._landed()
        if c.pick:
            owner, z = place.col <= 0, None
        else:
            owner, z = self.hit(mX, place, target, o)
        if c.lean:
            mine, total, off = self.lean_sum(row)
        else:
            mine = self.top(row, o)
            total = self.total(self.exponentials(row, o, finite(mine)))
        top, total = self.join(mine, total, row)
        if c.pick:
            rows, begin = self._kept
            at = begin + cutlass.select_(target.known, target.index, Int32(0))
            z = rows[at].to(Float32)
        rest = log(total)
        if c.lean:
            rest = rest - off
        first = place.col <= 0
        loss = self.loss(target, top - z + rest, top + rest, None, o)
        writes = cutlass.select_(target.known, owner, first)
        self.put(mLoss, kept, loss, (top, rest, Float32(self.N)), place, writes, first, mX.shape[0])

    def lean_sum(self, row: Row):
        """(largest value, sum of exponentials below it, what the sum's logarithm is too large by): of a warp."""
        t = self.tile
        held = []
        for j in range(t.blocks):
            part = row.data[None, j]
            if self.config.load == "shared":
                mine = cute.make_rmem_tensor_like(part)
                cute.autovec_copy(part, mine)
                part = mine
            held.append(part)
        tops = [cute.recast_tensor(part, Uint32)[i] for part in held for i in range(t.vector // 2)]
        while len(tops) > 1:
            tops = [max2(tops[i], tops[i + 1]) for i in range(0, len(tops), 2)]
        # lanes' pairs are joined as pairs: the two halves meet at the end
        pair = tops[0]
        for i in range(self._lanes().bit_length() - 1):
            pair = max2(pair, cute.arch.shuffle_sync_bfly(pair, offset=1 << i))
        low, high = (pair << 16).bitcast(Float32), (pair & Uint32(0xFFFF0000)).bitcast(Float32)
        mine = cute.arch.fmax(low, high)
        below = finite(mine)
        base = below * Float32(LOG2E)
        over = fma(below, Float32(LOG2E), -base)  # 2**over is in each exponential
        sums = [None, None]
        for k, part in enumerate(held):
            e = cute.math.exp2(widened(part) * LOG2E - base, fastmath=True)
            sums[k % 2] = e if sums[k % 2] is None else sums[k % 2] + e
        vector = sums[0] if sums[1] is None else sums[0] + sums[1]
        total = warp_reduce(vector.reduce(cute.ReductionOp.ADD, 0.0, 0), lambda a, b: a + b, self._lanes())
        if t.threads_per_row > 32:  # another warp's sum has another such factor
            return mine, total * cute.math.exp2(-over, fastmath=True), Float32(0)
        return mine, total, over * Float32(LN2)


def build(spec, config):
    if not isinstance(config, Trial):
        return shipped.build(spec, config)
    _, arguments = shipped.build(spec, RowConfig(config.threads_per_row, config.threads, 1, config.load))
    return TrialCE(spec, config), arguments


class EarlyCE(CrossEntropy):
    """As shipped (fused too), but the target's load stays before the row's: one line."""

    def _row(self, mX, place):
        cute.arch.sync_warp()
        return super()._row(mX, place)


def early(spec, config):
    return EarlyCE(spec, config), shipped.build(spec, config)[1]
