"""The products of a score warpgroup, slot by slot of the ring, with what it hands to the outputs under them.

A wait for a slot tells one filling from the next by parity alone: whoever waits has to know that the filling before is
there. Its own ones it has seen. Those of V, which others take, lie before the first slots of a product: once the
outputs have released P they have seen all of them. So that is waited for before the first slot whose place an unknown
filling had, ``WideConfig.known``.
"""
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, const_expr

import tkq.tile as tk
from tkq.attention.forward.state import Fields
from tkq.attention.wide.config import PARTS, STORE_UNDER


class Slots:
    """How many slots a step has: of its products, ``own``, and of its outputs, ``others``."""

    def __init__(self, config, head_dim):
        self.own, self.others = config.key_slots(head_dim), PARTS * config.value_slots(head_dim)
        self.known, self.in_flight = min(config.known(head_dim), STORE_UNDER), config.scores_in_flight


@cute.jit
def multiply(role, smem, regs, first: Constexpr[bool]):
    """A step's products. Under them P of the step before goes to the outputs, who begin when all but ``in_flight``
    slots are multiplied: before, they would only take the tensor cores from these products, and leave them idle under
    the softmax.

    role: its ``slots``; ``operands(smem, regs, i)`` gives (d, a, does d begin?) of slot i; ``store(smem, regs)`` stores
    P. first: there is none yet."""
    slots = role.slots
    for i in cutlass.range_constexpr(slots.own):
        smem.k_pipe.wait(regs.ring)
        d, a, begins = role.operands(smem, regs, i)
        if const_expr(begins):
            tk.mm_ABt(d, a, smem.k[regs.ring.stage])
        else:
            tk.mma_ABt(d, a, smem.k[regs.ring.stage])
        if const_expr(i > 0):
            tk.mma_wait(1)
            release_before(smem.k_pipe, regs.ring, 1)
        regs.ring.advance()
        if const_expr(i == slots.known):
            smem.p_pipe.acquire_empty(regs.p_ring)
        if const_expr(not first and i == STORE_UNDER):
            role.store(smem, regs)
        if const_expr(not first and i == slots.own - slots.in_flight):
            commit(smem, regs)
    tk.mma_wait(0)
    release_before(smem.k_pipe, regs.ring, 1)
    if const_expr(not first):
        skip(regs.ring, slots.others)
        if const_expr(slots.in_flight == 0):
            commit(smem, regs)


def hand_over_last(role, smem, regs):
    """P of a task's last step, and Q's place."""
    tk.arrive(smem.q_empty)
    smem.p_pipe.acquire_empty(regs.p_ring)
    role.store(smem, regs)
    commit(smem, regs)
    skip(regs.ring, role.slots.others)


def commit(smem, regs):
    """P is there."""
    smem.p_pipe.commit(regs.p_ring)
    regs.p_ring.advance()


def store_tile(smem, tile, config):
    """P, or what has its place, into shared memory, by parts of a V slot's keys."""
    keys = config.value_keys
    for i in range(config.key_parts):
        tk.store(smem.p[i], tk.columns(tile, i * keys, keys))


def hand_over_factors(smem, regs, factors):
    """What O is multiplied by in the end."""
    smem.end_pipe.acquire_empty(regs.end)
    store_factors(smem, factors, 1)
    smem.end_pipe.commit(regs.end)
    regs.end.advance()


@cute.jit
def store_factors(smem, v: tk.RowVec, column: Constexpr[int]):
    """A value a row, from one thread of each quad."""
    row, factors = tk.first_row(), smem.factors
    if tk.lane_id() % 4 == 0:
        for r in cutlass.range_constexpr(2):
            factors[row + 8 * r, column] = v.tensor[r]


@cute.jit
def store_moved(smem, moved):
    """Is O of this warp's rows to be multiplied by its factors?"""
    of_warps = smem.moved
    if tk.lane_id() == 0:
        of_warps[tk.warp_id() % 4] = Int32(moved)


@cute.jit
def take_task(smem, q: tk.Ring, task: Fields):
    """Wait for a task and read it; its number of blocks."""
    tk.wait(smem.q_full, q.phase)
    for f in cutlass.range_constexpr(len(task.names)):
        task.values[f] = cute.arch.make_warp_uniform(smem.task[f])
    q.advance()
    return task["blocks"]


def skip(ring: tk.Ring, n):
    """Past ``n`` slots of others."""
    ring.count[0] = ring.count[0] + n


def release_before(pipe, ring, n):
    """Release the slot ``n`` places before the ring's."""
    before = tk.ring(ring.stages)
    before.count[0] = ring.count[0] - n
    pipe.release(before)
