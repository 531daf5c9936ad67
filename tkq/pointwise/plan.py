"""Which thread takes what. Pure: no torch, no DSL.

The kernels do this arithmetic on values of the DSL, the tests on Python's integers: `select(condition, a, b)` is
`cutlass.select_` there, and an ordinary conditional here."""
from dataclasses import dataclass

from .spec import WIDTH, GatedSpec, RopeSpec

SMEM_OF_AN_SM, SMEM_OF_THE_DRIVER = 228 << 10, 1 << 10  # bytes: of Hopper's, and of each block
MAX_UNITS = (1 << 31) - (1 << 20)  # of one launch: units are counted in 32 bits, and the last block may pass the end


@dataclass(frozen=True)
class GatedConfig:
    """threads: of a block. vectors: that a thread takes, a block's threads apart; it loads all before it uses any."""

    threads: int = 128
    vectors: int = 2


def plan_gated(spec: GatedSpec) -> GatedConfig:
    """Of whole vectors 4 loads in flight a thread in the forward, 3 in the backward; more of narrower ones, and where
    gate and up interleave. With twice as many of whole ones geglu of 8192 x 8192 took 136.1 us for 133.4, swiglu 133.7
    for 133.7, their backwards 223.3 for 222.7 and 223.8 for 223.1 (an H100)."""
    apart, whole = spec.packing != "interleaved", spec.vector * WIDTH[spec.dtype] == 128
    vectors = 1 if spec.backward else 2
    return GatedConfig(vectors=vectors if apart and whole else 2 * vectors if apart else 4 * vectors)


def vector_of(config: GatedConfig, block, thread, j):
    """The j-th vector of a thread, counted row after row through the result."""
    return block * (config.threads * config.vectors) + j * config.threads + thread


def gated_variants(spec: GatedSpec) -> list[GatedConfig]:
    """The configs worth timing, the planned one first."""
    every = [GatedConfig(threads, vectors) for threads in (128, 256) for vectors in (1, 2, 4, 8)]
    return list(dict.fromkeys([plan_gated(spec), *every]))


@dataclass(frozen=True)
class RopeConfig:
    """threads: of a block. heads_each: heads of one token that a thread takes with one load of cos and sin. blocks: how
    many are on an SM at once, at most; 0: as many as fit."""

    threads: int = 128
    heads_each: int = 4
    blocks: int = 0


def plan_rope(spec: RopeSpec, heads: int) -> RopeConfig:
    """heads: of x; the larger count where there are two tensors.

    Of accesses of 16 bytes, where a token's row of the table is known without a load, 4 in flight a thread and 6
    blocks: 48 KB on an SM. With 128 KB B 4, S 4096, H 32, D 128 took 93.0 us for 92.0 (a copy 90.0), and with 24 KB
    96.4 (docs/attempts/losses_and_pointwise.md). Otherwise 8 loads in flight, and all blocks that fit. Fewer loads
    where there are fewer heads, and then all blocks, too."""
    few = spec.vector * WIDTH[spec.dtype] == 128 and rows_are_known(spec)
    most = wanted = (4 if few else 8) // (2 if columns(spec).two else 1)
    while most > 1 and most > heads:
        most //= 2
    return RopeConfig(heads_each=most, blocks=6 if few and most == wanted else 0)


def rope_variants(spec: RopeSpec, heads: int) -> list[RopeConfig]:
    """The configs worth timing, the planned one first."""
    every = [RopeConfig(threads, each, resident // threads) for threads in (128, 256) for each in (1, 2, 4, 8)
             for resident in (0, 768) if each <= heads]
    return list(dict.fromkeys([plan_rope(spec, heads), *every]))


def held_back(config: RopeConfig) -> int:
    """Bytes of shared memory that a block has for nothing but that no more than ``config.blocks`` fit on an SM."""
    if not config.blocks:
        return 0
    return (SMEM_OF_AN_SM // config.blocks - SMEM_OF_THE_DRIVER) // 128 * 128


def past_l1(spec: RopeSpec) -> bool:
    """Do loads of heads pass L1 over? It pays for heads of 128 columns in 16 bits (92.0 us, 93.9 without, at B 4,
    S 4096, H 32 on an H100), not of 64 (50.3, 47.2), where an access of a warp has halves of lines. Stores leave L2
    first with either, which the table has to itself then."""
    return (spec.rotary_dim + spec.rest) * WIDTH[spec.dtype] >= 128 * 16


@dataclass(frozen=True)
class Columns:
    """How the columns of one head are dealt out, in chunks: first those that rotate, then those that are copied.

    A chunk is one access of `vector` elements, or `two` of them `gap` (in a copied chunk `rest_gap`) elements apart, of
    which the second may lie past the end of what is copied. Chunks begin `step` elements apart.
    """

    rotating: int
    copied: int
    step: int
    two: bool
    gap: int
    rest_gap: int

    @property
    def chunks(self) -> int:
        return self.rotating + self.copied


def columns(spec: RopeSpec) -> Columns:
    v, half = spec.vector, spec.rotary_dim // 2
    if spec.interleaved and v > 1:
        return Columns(spec.rotary_dim // v, spec.rest // v, v, False, 0, 0)
    copied = -(-spec.rest // (2 * v))
    if spec.interleaved:
        return Columns(half, copied, 2, True, 1, 1)
    return Columns(half // v, copied, v, True, half, copied * v)


def place_of(spec: RopeSpec, chunk, select):
    """(does the chunk rotate? its first column, how far its second access is from the first)

    Where the second access would lie past the end, it is the first once more: the same elements are copied twice."""
    c = columns(spec)
    if c.copied == 0:
        return True, chunk * c.step, c.gap
    rotates = chunk < c.rotating
    copied = spec.rotary_dim + (chunk - c.rotating) * c.step
    rest_gap = select(copied + c.rest_gap < spec.rotary_dim + spec.rest, c.rest_gap, 0)
    return rotates, select(rotates, chunk * c.step, copied), select(rotates, c.gap, rest_gap)


def unit_of(unit, chunks: int, groups):
    """(token, group of heads, chunk) of a unit. groups: how many, an integer or a divider that divmod takes."""
    token, group = divmod(unit // chunks, groups)
    return token, group, unit % chunks


def table_vector(spec: RopeSpec) -> int:
    """Elements of cos, and of sin, that go with one chunk."""
    return spec.vector if columns(spec).two else spec.vector // 2


def table_alignment(spec: RopeSpec) -> int:
    """Bytes that the addresses of the table's rows must be multiples of."""
    return min(16, table_vector(spec) * WIDTH[spec.table] // 8)


def rows_are_known(spec: RopeSpec) -> bool:
    """Do sizes alone show that every token's row is in the table?"""
    return spec.positions == "token" or (spec.positions == "offset" and not spec.varlen)
