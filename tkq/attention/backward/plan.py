"""From what was asked of the backward to how its kernels are built: pure Python, tested without a GPU. No kernel
depends on this file."""
from dataclasses import replace

from tkq.attention.backward.config import BackwardConfig
from tkq.attention.backward.spec import BackwardSpec
from tkq.attention.forward.plan import LENGTHS, length_class
from tkq.runtime.compile.recipe import Recipe

BRIEF = 512  # most keys of packed sequences that are brief
PACKED_LENGTHS = ("brief", *LENGTHS)


def packed_class(seqlen_k: int) -> str:
    """``length_class`` of packed sequences, by the number of keys of the longest."""
    return "brief" if seqlen_k <= BRIEF else length_class(seqlen_k)


def recipe(spec: BackwardSpec, config: BackwardConfig) -> Recipe:
    """Of the kernels of a configuration. With dq_reduce "ordered" they are the same, deterministic or not."""
    spec = replace(spec, deterministic=False) if config.ordered else spec
    return Recipe("tkq.attention.backward.kernel:BackwardKernel", (spec, config))


def plan(spec: BackwardSpec, length: str = "medium", group: int = 1) -> BackwardConfig:
    """The configuration for a problem of short, medium or long sequences (``length_class`` of the keys; of packed ones
    ``packed_class``). group: query heads that share a K/V head."""
    if _in_order(spec, group):
        return replace(_DQ_ORDERED[spec.width], ping_pong=_ping_pong(spec),
                       l2_section_mb=_ordered_section(spec, length))
    config = _planned(spec, length, group)
    if spec.varlen and spec.left:  # of the kernel that makes dQ alone, the producer needs more registers
        config = replace(config, dq_kernel_kv=min(config.dq_kernel_kv, 96 if spec.width <= 128 else 48),
                         dq_kernel_registers=(40, 232))
    elif spec.varlen and spec.width == 128 and spec.deterministic:
        config = replace(config, dq_kernel_registers=(40, 232))
    return config


def _in_order(spec, group):
    """Is dQ reduced in a fixed order by the blocks with the keys? Where deterministic asks for it; and where it is
    faster: dense at head_dim 64 without shared heads, as nothing is zeroed, 1.02 to 1.04 (H200)."""
    if not spec.dq or spec.left or spec.softcap or (spec.width == 256 and group > 1):
        return False
    return spec.deterministic or (spec.width == 64 and group == 1 and not spec.varlen)


def _planned(spec, length, group):
    if spec.softcap:
        return _SOFTCAP[spec.width]
    if spec.width == 256 or spec.left or spec.deterministic or not spec.dq:
        windows = spec.width == 64 and spec.left and not spec.varlen
        return _D64_WINDOW if windows else SINGLE[spec.width]
    if spec.varlen and length == "brief" and (spec.width == 128 or spec.right):
        return _DQ_SERIAL[spec.width]
    if group > 1:
        return _of_groups(spec, length, group)
    behind = replace(_HELPER_WARPS[spec.width], l2_section_mb=_section(spec, length),
                     ping_pong=_ping_pong(spec))
    # else its helper warps fall behind
    return replace(behind, fuse_preprocess=True) if spec.varlen and length == "long" else behind


def _ping_pong(spec):
    """Dense at head_dim 128: 1.00 to 1.01 without ping-pong (S 2048, 8192)."""
    return spec.width == 64 or (spec.width == 128 and spec.varlen)


def _ordered_section(spec, length):
    """The more heads in a section, the later a block begins than the one before it in the order of a tile. In a causal
    problem, with two tiles of queries to a block, it is behind it by itself. At head_dim 256 with 64 MB, more than L2,
    0.61 to 0.97 of the speed that is usual, with 32 MB 0.95 to 1.03 (H200)."""
    if spec.width == 256:
        return 32
    if spec.right:
        return 16 if spec.width == 128 else 24
    return 32 if length == "long" else 24


def _section(spec, length):
    """Without masks it is only how far ahead zeroes are made."""
    if spec.width == 128 and not spec.right and (length == "short" or spec.varlen):
        return 24
    return 4 if length == "short" and not spec.varlen else 8


def _of_groups(spec, length, group):
    """Causal blocks end at different times, so that all query heads of all blocks at work would have to stay in L2
    together: so there are tasks for two of them at a time, if there are four or more; with short sequences, where
    helper warps zero too late, the first contributor to a dQ tile stores it, and the helper warps only convert dQ."""
    if spec.varlen or length == "short":
        return _of_short_groups(spec, length, group)
    in_parts = spec.width == 128 and group > 2 and group % 2 == 0
    if spec.right and in_parts:
        return _GQA_SPLIT if length == "medium" else _GQA_SPLIT_LONG
    if spec.right:
        whole = (spec.width == 128 and group == 2) or (spec.width == 64 and group in (2, 4) and length == "medium")
        return _GQA[spec.width] if whole else _PERSISTENT[spec.width]
    return _GQA[128] if spec.width == 128 and length == "medium" and group <= 4 else SINGLE[spec.width]


def _of_short_groups(spec, length, group):
    """Also packed ones."""
    if spec.varlen and (spec.width == 64 or length == "short"):
        return SINGLE[64] if spec.width == 64 else _D128_SHORT
    if spec.width == 128 and not spec.varlen:
        in_parts = group > 2 and group % 2 == 0
        return _HELPER_WARPS[128] if not spec.right else _DQ_FIRST_STORE if in_parts else _PERSISTENT[128]
    return _PERSISTENT[spec.width] if spec.right or length == "short" else SINGLE[spec.width]


# What a softcap's slope takes of registers is missing for tiles of 128 rows, and for wider parts of dQ.
_SOFTCAP = {64: BackwardConfig(dq_reduce="bulk"),
            128: BackwardConfig(dq_reduce="bulk", dq_cols=32, registers=(24, 56, 216)),
            256: BackwardConfig(block=64, stages=2, registers=(24, 72, 208, 208), dq_kernel_kv=48, dq_kernel_stages=1)}
_D64 = BackwardConfig(tile=128, dq_reduce="bulk", ping_pong=True, store_from_registers=True)
_D64_WINDOW = replace(_D64, dkv_parts=4)  # two limits leave no registers for parts of 64 queries
_D128 = BackwardConfig(dq_reduce="bulk", store_from_registers=True)
_D128_SHORT = BackwardConfig(dq_reduce="bulk", ping_pong=True)
_D256 = BackwardConfig(block=64, stages=2, registers=(24, 72, 208, 208), dq_kernel_kv=64, dq_kernel_stages=1)
_PERSISTENT = {64: replace(_D64, persistent=True),
               128: replace(_D128, ping_pong=True, persistent=True)}
_HELPER_WARPS = {width: replace(config, helper_warps=True, registers=(32, 64, 208), l2_section_mb=8)
                 for width, config in _PERSISTENT.items()}
_DQ_SERIAL = {64: replace(_PERSISTENT[64], dq_reduce="serial", stages=2, l2_section_mb=4),
              128: replace(_PERSISTENT[128], dq_reduce="serial", l2_section_mb=4)}
# At head_dim 256 blocks with shared heads, each with all its query heads, soon are at more tiles than L2 holds: causal
# 0.47 to 0.61 of the speed that is usual (16/4, S 2048 and 8192, H200), for 0.87 and 0.99 by a kernel of its own.
_DQ_ORDERED = {64: replace(_HELPER_WARPS[64], dq_reduce="ordered"),
               128: replace(_HELPER_WARPS[128], dq_reduce="ordered", dq_stages=2),
               256: replace(_D256, dq_reduce="ordered", dq_stages=0, persistent=True, store_from_registers=True,
                            helper_warps=True, registers=(32, 64, 208, 208))}
_GQA = {width: replace(config, by_query_head=True) for width, config in _HELPER_WARPS.items()}
_GQA_SPLIT = replace(_GQA[128], heads_per_task=2)
_GQA_SPLIT_LONG = replace(_GQA_SPLIT, tail_waves=2)
_DQ_FIRST_STORE = replace(_GQA_SPLIT, dq_reduce="first_store")
SINGLE = {64: _D64, 128: _D128, 256: _D256}  # of a width: blocks that have one task, what variants are made of
