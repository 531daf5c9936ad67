"""tkq.create_block_mask: what PyTorch sees."""
from __future__ import annotations

import math
import numbers
from collections.abc import Callable

import torch
from torch.nn.attention.flex_attention import BlockMask

from tkq.attention.flex.check import settled
from tkq.attention.flex.functions.trace import break_graph, trace
from tkq.attention.flex.launch import captured
from tkq.attention.flex.lists import ordered_both
from tkq.attention.flex.operands import MaskSizes
from tkq.attention.flex.plan import states_recipe
from tkq.reference.graphs import evaluate
from tkq.runtime import arguments, function
from tkq.runtime.call import alloc, ops
from tkq.runtime.call.ops import LaunchCache
from tkq.runtime.device import arch

OP = "create_block_mask"
MOST = 65535  # blocks of a grid along y and z
WARPS, RUN = 132 * 64, 4  # that an H100 holds at a time; blocks that share the bounds of their row, at most
_options = arguments.checker(OP, "B", "H", "Q_LEN", "KV_LEN", "device")
_launchers = LaunchCache()  # (device, graph) -> the kernel's function


def create_block_mask(mask_mod: Callable, B: int | None, H: int | None, Q_LEN: int, KV_LEN: int, device=None,
                      BLOCK_SIZE: int | tuple = 128) -> BlockMask:
    """A BlockMask of torch's, as ``torch.nn.attention.flex_attention.create_block_mask`` makes it, without the mask in
    memory: one kernel finds out what each block is, most of them by bounds of the mask (interval arithmetic) and the
    others element by element in registers, and writes one byte for each.

    Args:
        mask_mod: takes batch, head, query and key, int32 tensors of no dimension; gives a bool. Traced, as
            ``tkq.flex_attention`` has it.
        B, H: how many batch elements and heads differ; None: all are alike.
        Q_LEN, KV_LEN: queries and keys.
        device: where the mask's lists are; None: torch's default device.
        BLOCK_SIZE: queries and keys of a block, or one number for both; ``tkq.flex_attention`` takes multiples of 64.

    Returns:
        the BlockMask: lists of the blocks of keys of each block of queries, and the other way round, full blocks apart.

    Raises:
        TypeError: B, H, Q_LEN or KV_LEN is no int; device is no device; mask_mod is no function, or gives no bool;
            BLOCK_SIZE is no int, nor a pair of them.
        ValueError: B, H, Q_LEN or KV_LEN is outside 1 to 2^31 - 1; device is one that is not there; a BLOCK_SIZE
            outside of these; a captured tensor on another device.
        NotImplementedError: an operation that no kernel has, by its name; B times H, or blocks of queries, above 65535
            on a GPU.
        RuntimeError: a GPU other than Hopper.

    Example::

        def causal(b, h, q_idx, kv_idx):
            return q_idx >= kv_idx

        mask = tkq.create_block_mask(causal, None, None, 1024, 1024, device="cuda")
        partial = tkq.create_block_mask(causal, None, None, 1024, 1024, device="cuda").kv_num_blocks  # (1, 1, 8) int32
        q, k, v = torch.randn(3, 1, 8, 1024, 64, device="cuda", dtype=torch.bfloat16)
        o = tkq.flex_attention(q, k, v, block_mask=mask)  # (1, 8, 1024, 64) bfloat16
    """
    break_graph()
    B, H, Q_LEN, KV_LEN, device = _options(B, H, Q_LEN, KV_LEN, device)
    size = _size(BLOCK_SIZE)
    place = torch.empty(0, device=device)
    mask = trace("mask_mod", mask_mod, OP)
    mask = settled("mask_mod", mask, place, OP)
    shape = 1 if B is None else B, 1 if H is None else H, -(-Q_LEN // size[0]), -(-KV_LEN // size[1])
    sizes = MaskSizes(Q_LEN, KV_LEN, *size)
    found = _states(mask, shape, sizes, place) if place.is_cuda else _states_cpu(mask, shape, sizes, place.device)
    rows, columns = ordered_both(found)
    return BlockMask((Q_LEN, KV_LEN), *rows, *columns, BLOCK_SIZE=size, mask_mod=mask_mod)


ops.untraced(create_block_mask)


def _size(given) -> tuple:
    is_one = lambda n: isinstance(n, numbers.Integral) and not isinstance(n, bool)
    size = (given, given) if is_one(given) else given
    if not isinstance(size, (tuple, list)) or len(size) != 2 or not all(map(is_one, size)):
        raise TypeError(f"{OP}: BLOCK_SIZE is {given!r}, allowed is an int or a pair of them")
    if not all(1 <= n < 1 << 31 for n in size):
        raise ValueError(f"{OP}: BLOCK_SIZE is {given!r}, allowed are numbers from 1 to 2^31 - 1")
    return tuple(map(int, size))


def _states(mask, shape, sizes, place):
    """(B, H, blocks of queries, blocks of keys) int8: 0 not seen, 1 partly, 2 all of it."""
    if shape[0] * shape[1] > MOST or shape[2] > MOST:
        raise NotImplementedError(f"{OP}: B times H is {shape[0] * shape[1]}, blocks of queries are {shape[2]}; "
                                  f"supported are up to {MOST}")
    index = place.get_device()
    found, key = alloc.contiguous(index, shape, torch.int8), (index, mask.graph)
    kernel = _launchers.get(key)
    if kernel is None:
        arch.require_hopper(place.device)
        kernel = function(states_recipe(mask.graph))
        _launchers.add(key, kernel)
    kernel(found, captured(mask), sizes, run_of(shape))
    return found


def run_of(shape: tuple) -> int:
    """Blocks that a warp looks at: as many as leave enough warps."""
    return max(1, min(RUN, math.prod(shape) // WARPS))


@torch.no_grad()
def _states_cpu(mask, shape, sizes, device):
    """The same, a row of blocks at a time."""
    # a block that is larger than all is never full
    sizes = sizes._replace(rows=min(sizes.rows, sizes.queries + 1), columns=min(sizes.columns, sizes.keys + 1))
    found = torch.zeros(shape, dtype=torch.int8, device=device)
    b, h = (torch.arange(n, dtype=torch.int32, device=device) for n in shape[:2])
    kv = torch.arange(shape[3] * sizes.columns, dtype=torch.int32, device=device)
    for i in range(shape[2]):
        q = torch.arange(i * sizes.rows, (i + 1) * sizes.rows, dtype=torch.int32, device=device)
        at = {"b": b.view(-1, 1, 1, 1), "h": h.view(-1, 1, 1), "q": q.view(-1, 1), "kv": kv}
        seen = evaluate(*mask, at) & (at["q"] < sizes.queries) & (kv < sizes.keys)
        parts = seen.expand(*shape[:2], -1, -1).unflatten(3, (shape[3], sizes.columns))
        found[:, :, i] = parts.any(4).any(2).to(torch.int8) + parts.all(4).all(2)
    return found
