"""Variants of ``backward_seamless`` that are to be measured."""
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

import tkq.tile as tk
from tkq.attention import backward
from tkq.attention.backward_background import FINISHED, ZEROED
from tkq.attention.backward_seamless import Seamless
from tkq.attention.backward_seamless_background import PreparesTiles
from tkq.attention.backward_seamless_config import SeamlessConfig
from tkq.attention.backward_split import load_acquire
from tkq.attention.backward_tasks import claim


@dataclass(frozen=True)
class TriedConfig(SeamlessConfig):
    """rest: nanoseconds between two looks, which do not empty L1. red_parts: of dQ, that are added from registers, the
    last ones. under: dV is written under the last dK."""

    rest: int = 500
    relaxed: bool = False
    red_parts: int = 0
    under: bool = False


@dsl_user_op
def rest_for(ns, *, loc=None, ip=None):
    llvm.inline_asm(None, [], f"nanosleep.u32 {ns};", "", has_side_effects=True, is_align_stack=False,
                    asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip)


class Patient(PreparesTiles):
    @cute.jit
    def run(self, g):
        counters = g.background.counters
        tiles, zeroed = cute.size(g.acc, mode=[0]), Int32(0)
        cute.arch.griddepcontrol_wait()  # the counters are zero
        n = claim(counters.next, FINISHED)
        while n < tiles:
            goal = cutlass.min(n + self.lead(g, self.tile(g, n)), tiles)
            while zeroed < goal:
                zeroed = claim(counters.next, ZEROED)
                if zeroed < tiles:
                    self.prepare(g, zeroed)
                zeroed = zeroed + 1
            at = self.tile(g, n)  # found again: kept, it would take registers
            head = self.head(g, at)
            self.wait_for(counters.ready, head, self.tiles_of(g, at.rows_q))
            self.wait_for(counters.added, head, 4 * self.blocks(at.rows_k))
            self.convert(g, at)
            n = claim(counters.next, FINISHED)

    @cute.jit
    def wait_for(self, counts, i, wanted):
        found = self.look(counts, i)
        while found < wanted:
            rest_for(self.config.rest)
            found = self.look(counts, i)
        if const_expr(self.config.relaxed):
            found = load_acquire(counts, i)

    def look(self, counts, i):
        if not self.config.relaxed:
            return load_acquire(counts, i)
        return Int32(cute.arch.load(counts.iterator + i, Int32, sem="relaxed", scope="gpu"))


class Tried(Seamless):
    def __init__(self, spec, config: TriedConfig):
        super().__init__(spec, config)
        self.background = Patient(spec, config)

    @cute.jit
    def add_dq(self, g, s, dq, ring, number, last):
        rows, cols = self.config.dq_parts(self.spec.width)
        parts = rows * cols
        part_bytes = 64 * self.config.dq_cols * 4
        address = g.acc.iterator.toint() + number * (parts * part_bytes)
        for i in cutlass.range_constexpr(parts):
            self.make_dq(s, dq, ring, a_part=i // cols, b_part=i % cols)
            if const_expr(i == parts - 1):
                s.ds_pipe.release(ring)
                self.done_if(s, last)
            if const_expr(i < parts - self.config.red_parts):
                self.bulk_add_part(s, dq, address + i * part_bytes)
            else:
                self.add_part(dq, address + i * part_bytes)

    @cute.jit
    def keys_task(self, g, s, t, again: Constexpr, c, kv):
        if const_expr(self.config.under):
            self.keys_task_under(g, s, t, again, c, kv)
        else:
            Seamless.keys_task(self, g, s, t, again, c, kv)

    @cute.jit
    def keys_task_under(self, g, s, t, again: Constexpr, c, kv):
        tk.zero(c.dk)
        tk.zero(c.dv)
        for i in cutlass.range_constexpr(2):
            tk.wait(s.kv_full[i], kv.phase)
        tk.zero(c.kept)
        c.before.count[0] = c.ring.count[0]
        self.visit(g, s, t, c, self.step)
        for i in cutlass.range_constexpr(2):
            self.done_with(s, i)
        self.next_keys(kv)
        self.last_of(g, s, again(), c)

    @cute.jit
    def last_of(self, g, s, t, c):
        number = 2 * t.block + c.wg
        if c.before.count[0] != c.ring.count[0]:
            tk.mma_AB(c.dk, c.kept, s.q[c.before.stage])
            self.write(g, g.dv, c.dv, t, number)
            tk.mma_wait(0)
            s.q_pipe.release(c.before)
        else:
            self.write(g, g.dv, c.dv, t, number)
        tk.mul(c.dk, c.dk, g.scale)
        self.write(g, g.dk, c.dk, t, number)


def build(spec, config: TriedConfig):
    return Tried(spec, config), backward.build(spec, config)[1]
