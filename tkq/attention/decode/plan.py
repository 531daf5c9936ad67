"""From a spec to a config, and how work is divided. Pure: neither torch nor the DSL."""
from __future__ import annotations

from .config import DecodeConfig, DirectConfig
from .spec import DecodeSpec

ROWS = 64  # of a tile of packed queries
FEW = 8  # packed queries, at most, that are the columns of a warp's product: see `direct`
OVERHEAD = 256  # keys that beginning a task costs as much time as
LEAST = 64  # keys of a part, at least: one block
FIXED_KEYS = 1024  # of a split that does not depend on what else is in the batch
LATENT, MOST_TOGETHER = 576, 16  # columns of a latent row; blocks that read the same ones
SHARED = 224 * 1024  # bytes for tiles


def key_block(head_dim: int, head_dim_v: int) -> int:
    """Keys of a block: the unit in which plans count."""
    return 128 if max(head_dim, head_dim_v) <= 64 else 64


def blocks_of_sm(head_dim: int, head_dim_v: int) -> int:
    """Blocks of threads on an SM: one begins a task while the other is in the middle of its own."""
    return 2 if max(head_dim, head_dim_v) <= 128 else 1


def tiles_together(head_dim: int, queries: int, group: int) -> int:
    """Blocks that read the same keys at the same time, each for a tile of its own: of latent rows, whose queries are
    many tiles. 1 of others."""
    if head_dim != LATENT:
        return 1
    tiles = row_tiles(queries, group)
    return -(-tiles // -(-tiles // MOST_TOGETHER))


def padded(columns: int) -> int:
    """Columns of a tile in shared memory: whole panels of 128 bytes."""
    return -(-columns // 64) * 64


def plan(spec: DecodeSpec) -> DecodeConfig | DirectConfig:
    """As many stages as fit."""
    keys, blocks = key_block(spec.head_dim, spec.head_dim_v), blocks_of_sm(spec.head_dim, spec.head_dim_v)
    k, v = padded(spec.head_dim), padded(spec.head_dim_v)
    if spec.few:
        return _direct(keys, blocks)
    if spec.cache:
        return _of_float8(spec, keys, blocks, (k, v))
    stages = (SHARED // blocks - ROWS * k * 2) // ((k + v) * keys * 2)
    return DecodeConfig(keys, stages, (56, 200) if blocks == 2 else (120, 240), blocks)


def _direct(keys: int, blocks: int) -> DirectConfig:
    """As many keys of a step as leave a warp's registers without spills, of heads to 192."""
    step, warps = (32, 4) if blocks == 2 else (16, 8)
    return DirectConfig(step, warps, keys, blocks)


def _of_float8(spec: DecodeSpec, keys: int, blocks: int, columns: tuple) -> DecodeConfig:
    """Producers have rows in registers, and so have consumers q where registers are left: reading it for every product
    takes as long as reading K."""
    by_token = spec.scales == "token"
    held = blocks == 2 and not by_token and not spec.ragged
    stage = sum(columns) * keys * 2 + ((2 * keys + 4) * 4 if by_token else 0)
    stages = (SHARED // blocks - (0 if held else ROWS * columns[0] * 2)) // stage
    registers = (168, 240) if blocks == 1 else (88, 168) if by_token and keys == 64 else (80, 176)
    return DecodeConfig(keys, stages, registers, blocks, q_in_registers=held)


def row_tiles(queries: int, group: int) -> int:
    """Tiles of the packed queries of a K/V head, 1 or more."""
    return -(-queries * group // ROWS) or 1  # asked of a size that is not known yet, max would compare it
