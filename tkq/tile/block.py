"""A block and its roles: thread indices, initialisation, warp specialization and register allocation."""
from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, const_expr

from . import traced
from .naps import nap
from .sync import WARPGROUP

REGISTERS_OF_A_BLOCK = 65536


def warp_id():
    """This warp's number in the block, the same in all lanes."""
    return cute.arch.make_warp_uniform(cute.arch.warp_idx())


def warpgroup_id():
    """This warpgroup's number in the block, the same in all lanes."""
    return cute.arch.make_warp_uniform(cute.arch.warp_idx() // 4)


def first_warp_of_group():
    """True in the first warp of each warpgroup: the one that issues its TMA stores."""
    return warp_id() % (WARPGROUP // 32) == 0


def lane_id():
    """0 to 31."""
    return cute.arch.lane_idx()


def thread_in_warpgroup():
    """0 to 127."""
    return cute.arch.thread_idx()[0] % WARPGROUP


@cute.jit
def init_block(initialise: Constexpr[Callable], cluster: Constexpr[int] = 1):
    """One thread runs ``initialise()`` (the semaphores' counts); then all threads, of the whole cluster, go on.
    Every thread calls it."""
    traced.cluster_is("init_block", "cluster", cluster)
    nap("start")
    if warp_id() == 0:
        with cute.arch.elect_one():
            initialise()
    cute.arch.mbarrier_init_fence()
    if const_expr(cluster > 1):
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()
    else:
        cute.arch.sync_threads()


def register_split(consumers: int, few: int = 0, many: int = 0):
    """Registers a thread of the producer and of a consumer warpgroup may hold.

    A split that asks for more than the block was launched with hangs for ever in the hardware's allocation, so it is
    refused here. A launch of T threads has 65536 / T registers each, rounded down to 8 and at most 255.

    Returns:
        (few, many): the defaults for 1, 2 and 3 consumers are 56/256, 24/240 and 32/160.
    Raises:
        ValueError: not multiples of 8 from 24 to 256, fewer first, or more than the launch has.
    """
    default = {1: (56, 256), 2: (24, 240), 3: (32, 160)}
    if not few and not many:
        if consumers not in default:
            raise ValueError(f"specialise: consumers is {consumers}, allowed without registers= are {sorted(default)}")
        few, many = default[consumers]
    threads = WARPGROUP * (consumers + 1)
    at_launch = min(REGISTERS_OF_A_BLOCK // threads // 8 * 8, 255)
    if any(n % 8 or not 24 <= n <= 256 for n in (few, many)) or few > many:
        raise ValueError(f"specialise: registers are {few} and {many}, "
                         "allowed are multiples of 8 from 24 to 256, the producer's not the more")
    if WARPGROUP * (few + consumers * many) > at_launch * threads:
        raise ValueError(f"specialise: registers {few} + {consumers} x {many} "
                         f"are more than the {at_launch} x {consumers + 1} of the launch")
    return few, many


def specialise(producer: Constexpr[Callable], consumer: Constexpr[Callable], consumers: Constexpr[int],
               registers: Constexpr = (), producer_warps: Constexpr[int] = 1):
    """Warpgroup 0 gives up registers and its first ``producer_warps`` warps run ``producer()``; each of the other
    ``consumers`` warpgroups takes registers and runs ``consumer(index)``.

    registers: (few, many), see ``register_split``. Launch with blocks of 128 * (consumers + 1) threads, a number known
    when compiled, and with ``min_blocks_per_mp=1``, or the assembler drops the reallocation.

    Raises:
        ValueError: when traced: registers or ``producer_warps`` that there cannot be, or a block of another size.
    """
    split = register_split(consumers, *registers)
    if not 1 <= producer_warps <= WARPGROUP // 32:
        raise ValueError(f"specialise: producer_warps is {producer_warps}, allowed are 1 to 4")
    traced.block_is("specialise", WARPGROUP * (consumers + 1),
                    f"128 of the producer's warpgroup and 128 of each of {consumers} consumers")
    with traced.roles():
        _specialised(producer, consumer, split, producer_warps)


@cute.jit
def _specialised(producer: Constexpr[Callable], consumer: Constexpr[Callable], split: Constexpr,
                 producer_warps: Constexpr[int]):
    wg = warpgroup_id()
    if wg == 0:
        cute.arch.setmaxregister_decrease(split[0])
        if warp_id() < producer_warps:
            producer()
    else:
        cute.arch.setmaxregister_increase(split[1])
        consumer(wg - 1)


@dataclass(frozen=True)
class Role:
    """What some warpgroups of a block do, and with how many registers a thread: ``run(i)`` by the i-th of them. warps:
    how many warps of each run it, the first ones; the others are done."""

    run: Callable
    registers: int
    warpgroups: int = 1
    warps: int = 4


def roles_fit(roles) -> int:
    """Registers of a thread at launch, for the roles of a block.

    Raises:
        ValueError: not multiples of 8 from 24 to 256, or more in all than the launch has: the hardware would hang.
    """
    groups = sum(r.warpgroups for r in roles)
    at_launch = min(REGISTERS_OF_A_BLOCK // (WARPGROUP * groups) // 8 * 8, 255)
    wanted = [f"{r.warpgroups} x {r.registers}" for r in roles]
    if any(r.registers % 8 or not 24 <= r.registers <= 256 for r in roles):
        raise ValueError(f"assign: registers are {', '.join(wanted)}, allowed are multiples of 8 from 24 to 256")
    if sum(r.warpgroups * r.registers for r in roles) > at_launch * groups:
        raise ValueError(f"assign: registers {' + '.join(wanted)} are more than the {groups} x {at_launch} "
                         "of the launch")
    return at_launch


def assign(roles: Constexpr):
    """Give the block's warpgroups their roles, in order, each with its registers: ``specialise`` for any number of
    roles.

    roles: a tuple of ``Role``, that together have all warpgroups. Launch with blocks of 128 threads for each, a number
    known when compiled, and with ``min_blocks_per_mp=1``, or the assembler drops the reallocation.

    Raises:
        ValueError: when traced: registers that there cannot be, or a block of another size.
    """
    at_launch, groups = roles_fit(roles), sum(role.warpgroups for role in roles)
    traced.block_is("assign", WARPGROUP * groups, f"the roles have {groups} warpgroups")
    with traced.roles():
        _assigned(roles, at_launch)


@cute.jit
def _assigned(roles: Constexpr, at_launch: Constexpr[int]):
    first, wg = 0, warpgroup_id()
    for i in cutlass.range_constexpr(len(roles)):
        role = roles[i]
        if wg >= first and wg < first + role.warpgroups:
            if const_expr(role.registers > at_launch):
                cute.arch.setmaxregister_increase(role.registers)
            else:
                cute.arch.setmaxregister_decrease(role.registers)
            if const_expr(role.warps < WARPGROUP // 32):
                if warp_id() % 4 < role.warps:
                    role.run(wg - first)
            else:
                role.run(wg - first)
        first = first + role.warpgroups
