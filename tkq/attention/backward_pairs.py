"""Flash attention backward in bf16 with fewer instructions for each score: their power is the tensor cores'."""
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

import tkq.tile as tk
from tkq.attention import backward
from tkq.attention.backward import AttentionBackward, ChainedBackward
from tkq.attention.backward_config import BackwardConfig
from tkq.attention.backward_first import FirstStores
from tkq.attention.backward_first_config import FinishConfig, FirstConfig
from tkq.attention.backward_first_finish import FirstFinishes
from tkq.attention.backward_grouped import GroupedBackward
from tkq.attention.backward_grouped_config import GroupedConfig
from tkq.attention.backward_seamless import Seamless
from tkq.attention.backward_seamless_config import SeamlessConfig
from tkq.attention.backward_spec import BackwardSpec


@dsl_user_op
def multiply_pairs(a, b, *, loc=None, ip=None):
    """a * b, of two bf16 each."""
    return Int32(llvm.inline_asm(
        T.i32(), [Int32(x).ir_value(loc=loc, ip=ip) for x in (a, b)], "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r",
        has_side_effects=False, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip))


@dsl_user_op
def load_pair(address, *, loc=None, ip=None):
    """Two fp32 in shared memory, not before it is their turn: the registers they go to are in use until then."""
    found = llvm.inline_asm(
        llvm.StructType.get_literal([T.f32(), T.f32()]), [Int32(address).ir_value(loc=loc, ip=ip)],
        "ld.volatile.shared.v2.f32 {$0, $1}, [$2];", "=f,=f,r", has_side_effects=True, is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip)
    return [Float32(llvm.extractvalue(T.f32(), found, [i], loc=loc, ip=ip)) for i in range(2)]


class Pairs:
    """dS of ``AttentionBackward`` = P * (dP + delta) in pairs of 16 bits: dP + delta is rounded to bf16 and multiplied
    by P as it is there for dV, which need not be taken apart. Of the 433 instructions of a warp for a tile of 64
    queries, head_dim 128, this takes 48 away.

    ``begins``: the accumulators of dP are delta when its product begins, in place of an addition for each score: 17
    instructions less. Delta is read once and copied: to read it again costs more than the additions, as shared memory
    is short of time.

    The error of dQ and dK before their own rounding is 1.2 times that with the same P times fp32, and 1.7 times that
    with P in fp32, too; with all that is in between in bf16 it is 3.7 times that. fp16 might overflow in dP, before P
    makes it small."""

    @property
    def begins(self) -> bool:
        """Where it is faster, by what was measured."""
        return self.spec.width == 128 and not (self.spec.left or self.spec.right)

    def multiply_dp(self, s, c):
        if self.begins:
            self.begin_with_delta(s, c)
            tk.mma_ABt(c.dp, s.v[c.wg], s.do[c.ring.stage])
        else:
            super().multiply_dp(s, c)

    def begin_with_delta(self, s, c):
        """In both of a thread's rows."""
        tile = self.config.tile
        delta = Int32(s.stats[None, c.ring.stage].iterator.toint()) + 4 * tile + tk.lane_id() % 4 * 8
        for j in range(tile // 8):
            two = load_pair(delta + 32 * j)
            for row in range(2):
                c.dp.tensor[4 * j + 2 * row], c.dp.tensor[4 * j + 2 * row + 1] = two

    def make_ds(self, s, c):
        if self.begins:
            tk.apply_narrow(c.ds, lambda dp: dp, c.dp)
        else:
            tk.apply_narrow(c.ds, lambda dp, delta: dp + delta, c.dp, self.stats(s, c.ring, 1))
        ds, p = (cute.recast_tensor(x.tensor, Int32) for x in (c.ds, c.p))
        for i in range(cute.size(ds)):
            ds[i] = multiply_pairs(ds[i], p[i])


class PairsBackward(Pairs, AttentionBackward):
    """Blocks that have the keys, and add to dQ."""


class PairsChained(Pairs, ChainedBackward):
    """With dQ that goes from block to block."""


class PairsGrouped(Pairs, GroupedBackward):
    """For query heads that share a K/V head."""


class PairsFirst(Pairs, FirstStores):
    """Likewise, without zeroes."""


class PairsFinish(Pairs, FirstFinishes):
    """Likewise, finished under the products."""


class PairsSeamless(Pairs, Seamless):
    """Without seams."""


def _kind(config):
    for kind, of in ((PairsFinish, FinishConfig), (PairsFirst, FirstConfig), (PairsGrouped, GroupedConfig),
                     (PairsSeamless, SeamlessConfig)):
        if isinstance(config, of):
            return kind
    return PairsChained if config.chain else PairsBackward


def build(spec: BackwardSpec, config: BackwardConfig):
    """As ``backward.build``."""
    return _kind(config)(spec, config), backward.build(spec, config)[1]
