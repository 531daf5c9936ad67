"""From what was asked for to how the kernel is built: pure Python, tested without a GPU. No kernel depends on this
file.

The choices come from measurements on an H100 (bench/tune/attention.py repeats them)."""
import contextlib
import itertools
from dataclasses import replace

from tkq.attention.forward.config import AttentionConfig
from tkq.attention.forward.spec import AttentionSpec
from tkq.runtime.compile.recipe import Recipe

LENGTHS = ("short", "medium", "long")
SHORT, LONG = 2048, 8192  # keys: short below, long from
PACK_ROWS = 128  # of a tile, for pack_of


def length_class(seqlen_k: int) -> str:
    """All that a plan needs to know of the lengths, so that few kernels are compiled and looked up."""
    return "short" if seqlen_k < SHORT else "medium" if seqlen_k < LONG else "long"


def pack_of(rows: int, ratio: int) -> int:
    """How many of the ``ratio`` query heads of a K/V head go into one tile of rows: as many as a power of 2 allows,
    where that saves a quarter of the tiles or more: a head's own rows leave much of its last tile empty."""
    pack = min(ratio & -ratio, 64)
    alone, together = pack * -(-rows // PACK_ROWS), -(-rows * pack // PACK_ROWS)
    return pack if 4 * together <= 3 * alone else 1


def recipe(spec: AttentionSpec, config: AttentionConfig) -> Recipe:
    """Of the kernel of a configuration."""
    return Recipe("tkq.attention.forward.kernel:AttentionForward", (spec.kernel(), config))


def plan(spec: AttentionSpec, length: str = "medium") -> AttentionConfig:
    """The configuration for a problem of short, medium or long sequences (see ``length_class``)."""
    spec = spec.kernel()
    config = _measured(spec, "short" if spec.left else length) or fitted(spec.head_dim, spec.head_dim_v)
    # Finding a task among sequences takes the producer more registers than the two consumers leave it by default.
    return replace(config, registers=(40, 232)) if spec.varlen else config


def _measured(spec, length):
    """From tables, None where there is none. What is limited on the left has few blocks a task, as short sequences."""
    dims, long = (spec.head_dim, spec.head_dim_v), length == "long"
    if dims == (64, 64):
        # three consumers leave the producer of varlen too few registers
        return _D64_SHORT if spec.varlen or spec.left or (spec.causal and length == "short") else _D64
    if dims == (128, 128):
        if long and spec.longest_first:
            return _D128_FREE
        if long and not spec.left:
            return _D128_LONG_VARLEN if spec.varlen else _D128_LONG_FULL
        if length == "medium" and not (spec.longest_first or spec.varlen):
            return _D128_FREE
        return _D128
    return _WIDE.get(dims)


# Measured on an H100, B * S = 16384, H * D = 2048, at 1024, 4096 and 16384 keys, against others in the same run (see
# docs/attempts.md).
# head_dim 128: without ``overlap_tasks``, which was best while the softmax took longer: now causal problems of 1024 and
#   4096 keys have 0.95 and 0.97 of what is planned with it, full ones 0.99 and 0.96. PingPong: 4096 keys, full, are
#   1.04 times
#   as fast without them; 1024 full have 0.99, causal 0.95, 4096 causal 0.97. Pairs of blocks with the widest tiles of K
#   and V win where all is full and long; at 4096 keys they have 0.93. That long begins at 8192 is a guess between 4096
#   and 16384.
# head_dim 64: three consumers, a third stage; two consumers win where causal tasks are few blocks long.
_D128 = AttentionConfig()
_D128_FREE = AttentionConfig(ping_pong=False)
_D128_LONG_FULL = AttentionConfig(kv=176, schedule="static", cluster=2, q_stages=1, o_store_steps=2, ping_pong=False)
_D128_LONG_VARLEN = replace(_D128_LONG_FULL, schedule="dynamic")
_D64 = AttentionConfig(consumers=3, stages=3)
_D64_SHORT = AttentionConfig()

# Beyond 128 columns the products take so much longer than the softmax that no ping-pong is needed. 192 and 192 is not
# measured; what the others were chosen from is in docs/attempts.md.
_WIDE = {
    (192, 128): AttentionConfig(ping_pong=False, q_stages=1, o_from_registers=True),
    (192, 192): AttentionConfig(kv=112, ping_pong=False, q_stages=1, o_reuses_q_smem=True),
    (256, 256): AttentionConfig(kv=80, ping_pong=False, q_stages=1, o_from_registers=True, l2_section_mb=32),
}


def fitted(head_dim: int, head_dim_v: int) -> AttentionConfig:
    """A configuration for any pair of tiles: the largest K and V tiles up to 128 keys that go with two consumers, and
    then as much room for Q and O as is left, with ``overlap_tasks`` where it is enough for the next task's Q."""
    panels = [head_dim_v // cols for cols in (64, 32) if head_dim_v % cols == 0]
    layouts = (dict(overlap_tasks=True), *(dict(q_stages=1, o_store_steps=n) for n in (1, *panels)))
    for kv, layout in itertools.product((128, 112, 96, 80, 64, 48), layouts):
        config = AttentionConfig(kv=kv, ping_pong=max(head_dim, head_dim_v) <= 128, **layout)
        with contextlib.suppress(ValueError):
            return config.check(head_dim, head_dim_v)
    raise NotImplementedError(f"flash_attn: no configuration for head_dim {head_dim} and head_dim_v {head_dim_v}")
