"""A block mask's lists the other way round: for each block of keys its blocks of queries. On the GPU, without waiting
for it."""
from __future__ import annotations

from typing import NamedTuple

import torch

from tkq.attention.flex.operands import BackwardLists, BlockLists
from tkq.attention.flex.plan import lists_recipe
from tkq.runtime import function
from tkq.runtime.call import alloc
from tkq.runtime.device import arch

BLOCK, HALF = 128, 64  # keys of the most that a backward's task has, and of one of its two warpgroups


_kernels: dict = {}  # (device, both) -> the kernel's function


def _kernel(device, both):
    found = _kernels.get((device, both))
    if found is None:
        arch.require_hopper(device)
        found = _kernels[device, both] = function(lists_recipe(both))
    return found


class Blocks(NamedTuple):
    """Of a block mask. lists: of each block of queries its blocks of keys; size: (queries, keys) of a block; queries:
    of each block of keys its blocks of queries, or None. wide: lists, for each batch element and query head."""

    lists: BlockLists
    size: tuple
    queries: BlockLists | None = None
    wide: BlockLists | None = None


def widened(blocks: Blocks | None, q) -> Blocks | None:
    """With ``wide`` lists. q: (B, H, ..)."""
    if blocks is None or blocks.wide is not None:
        return blocks
    return blocks._replace(wide=BlockLists(
        *(x if x is None else x.expand(*q.shape[:2], *x.shape[2:]) for x in blocks.lists)))


def backward_lists(blocks: Blocks, keys: int, task: int = BLOCK) -> tuple:
    """(BackwardLists, tasks in a listed block of keys): the mask's own lists where a block of keys is a number of
    tasks, of ``task`` keys; else lists of tasks, of two halves."""
    if blocks.size[1] % task == 0:
        if blocks.queries is not None:
            return BackwardLists(blocks.queries), blocks.size[1] // task
        return BackwardLists(ordered(_states(blocks, keys).mT)), blocks.size[1] // task
    states = _states(blocks, keys).repeat_interleave(blocks.size[1] // HALF, 3)[..., :-(-keys // HALF)]
    states = torch.nn.functional.pad(states, (0, states.shape[3] % 2))
    first, second = states[..., ::2], states[..., 1::2]
    both = torch.where(first == second, first, 1)
    return BackwardLists(ordered(both.mT), states.int()), 1


def _states(blocks, keys):
    """(B, H, blocks of queries, blocks of keys) int8: 0 not listed, 1 with the mask, 2 full."""
    lists, columns = blocks.lists, -(-keys // blocks.size[1])
    found = torch.zeros(*lists.num.shape, columns + 1, dtype=torch.int8, device=lists.num.device)
    for state, num, indices in ((1, lists.num, lists.indices), (2, lists.full_num, lists.full_indices)):
        if num is not None:
            counts = torch.arange(indices.shape[3], device=num.device) < num.unsqueeze(-1)
            at = torch.where(counts, indices.long().clamp(0, columns - 1), columns)
            found.scatter_(3, at, state)
    return found[..., :columns]


def ordered(states) -> BlockLists:
    """Of each row of states its partial blocks, then its full ones: as torch has them, those that are not listed behind
    those that are."""
    if not states.is_cuda:
        return _ordered_cpu(states)
    found = _lists(states.get_device(), states.shape[:3], states.shape[3])
    _kernel(states.device, False)(states, found, None)
    return found


def ordered_both(states) -> tuple:
    """(those of each row of states, those of each column), in one launch."""
    if not states.is_cuda:
        return _ordered_cpu(states), _ordered_cpu(states.mT)
    index, (B, H, rows, columns) = states.get_device(), states.shape
    found = _lists(index, (B, H, rows), columns), _lists(index, (B, H, columns), rows)
    _kernel(states.device, True)(states, *found)
    return found


def _lists(index, shape, most) -> BlockLists:
    """Not filled. shape: of the numbers; most: indices of each."""
    new, (B, H, rows) = alloc.maker(index), shape
    given = (B, H, rows), (H * rows, rows, 1), torch.int32
    wide = (B, H, rows, most), (H * rows * most, rows * most, most, 1), torch.int32
    return BlockLists(new(*given), new(*wide), new(*given), new(*wide))


def _ordered_cpu(states) -> BlockLists:
    def rows(state):
        here = states == state
        counts, others = here.cumsum(3, dtype=torch.int32), (~here).cumsum(3, dtype=torch.int32)
        num = counts[..., -1]
        place = torch.where(here, counts, others + num.unsqueeze(3)) - 1
        numbers = torch.arange(states.shape[3], dtype=torch.int32, device=states.device).expand(states.shape)
        return num.contiguous(), torch.empty(states.shape, dtype=torch.int32, device=states.device).scatter_(
            3, place.long(), numbers)

    return BlockLists(*rows(1), *rows(2))
