"""Which float8 products take the kernel whose blocks share K, and in which shape: those of few rows of A, up to 128,
and those of more whose tiles are few. Pure Python."""
from dataclasses import replace
from typing import Optional

from ...granularity import PRODUCTS, pair_name, scales_of
from ...runtime.compile.expectation import REGISTER_FILE, Expectation
from ...runtime.compile.recipe import Recipe, Shipped
from ..dense.small_m_config import SLOT_BYTES, WIDTHS
from ..dense.small_m_plan import FEWEST_STEPS, HBM, MOST_M, fit_to_spec
from .config import STEP
from .small_m_config import SmallMFp8Config
from .spec import BYTES, Fp8Spec

# Measured on an H100 (docs/attempts/gemm.md):
STREAMS = 32  # rows of A; with more, tiles are as fast where K is not shared
ROWS = 64  # of B's transpose to a block: with 128, nothing was faster by more than 1 %
PROCESSOR = {False: 110, True: 60}  # bytes a nanosecond that one processor reads of A and B; where sums are promoted
ENOUGH = 0.9  # of what HBM gives, from which on more blocks gain nothing
WAVES = range(3, 7)  # of blocks on each processor: the last one weighs, so they are shorter (four share K), and one
# begins under the other's end (two on a processor, so that all can be in clusters)
TILES_STEPS = 32  # of K, from which on blocks share it that have part of A's rows


def plan(spec: Fp8Spec, M: int, N: int, K: int, num_sms: int) -> Optional[SmallMFp8Config]:
    """The configuration; None where tiles (``fp8.plan``) are as fast."""
    if M > MOST_M:
        return of_tiles(spec, M, N, K, num_sms)
    m, blocks, steps = next(width for width in WIDTHS if width >= M), -(-N // ROWS), -(-K // STEP)
    if M <= STREAMS and -(-blocks // num_sms) in WAVES and steps // 4 >= FEWEST_STEPS:
        return fit_to_spec(SmallMFp8Config(m, ROWS, 4, pdl=True), spec, places=2)
    split = splits(PROCESSOR[spec.promote] * ROWS / (ROWS + m), blocks, steps, num_sms)
    if M > STREAMS and split == 1:
        return None
    return fit_to_spec(SmallMFp8Config(m, ROWS, split, pdl=True), spec, places=1)


def of_tiles(spec: Fp8Spec, M: int, N: int, K: int, num_sms: int) -> Optional[SmallMFp8Config]:
    """Where tiles of 128 rows and 64 columns leave half of the processors without one: as many blocks share K as find
    place. Promoted sums rather have 128 columns, a warpgroup's more to go on with while one waits, and four blocks."""
    steps = -(-K // STEP)
    rows, split = ROWS, splits(0, tiles(M, N, ROWS), steps, num_sms) if steps >= TILES_STEPS else 1
    if spec.promote and split == 2 and 4 * tiles(M, N, 2 * ROWS) <= num_sms // 2:
        rows, split = 2 * ROWS, 4
    return fit_to_spec(SmallMFp8Config(MOST_M, rows, split, pdl=True), spec, places=1) if split > 1 else None


def tiles(M: int, N: int, rows: int) -> int:
    """Of the widest kernel, with ``rows`` columns of B to a block."""
    return -(-M // MOST_M) * -(-N // rows)


def splits(rate: float, tiles: int, steps: int, num_sms: int) -> int:
    """How many blocks share K: as few as read B about as fast as HBM gives it. Clusters of four and eight fit badly on
    all processors: they may take half of them. rate: bytes of B a nanosecond that a block reads."""
    found = 1
    for split in (2, 4, 8):
        fits = tiles * split <= (num_sms if split == 2 else num_sms // 2)
        if found * tiles * rate >= ENOUGH * HBM or not fits or steps // split < FEWEST_STEPS:
            break
        found = split
    return found


def recipe(spec: Fp8Spec, config: SmallMFp8Config) -> Recipe:
    """What to compile. The result goes out element by element, whatever its strides allow."""
    spec = replace(spec, store="direct")
    return Recipe("tkq.gemm.fp8.small_m_kernel:SmallMFp8Gemm", (spec, config.check(spec)))


def expectation(spec: Fp8Spec, config: SmallMFp8Config) -> Expectation:
    """What its machine code must show: registers and shared memory for as many blocks on a processor as the stages
    leave room for."""
    places = 2 if config.shared_bytes(spec) <= SLOT_BYTES else 1
    wanted = ("UTMALDG", "STG", *["LDGSTS"] * spec.per_step)
    registers = min(255, REGISTER_FILE // places // config.threads // 8 * 8)
    return Expectation(tensor=STEP // 32, waits_per_mma=0.5, instructions=wanted, registers=registers,
                       smem=2 // places * SLOT_BYTES + 1024)


SHAPES = (  # m, rows, split, blocks on a processor
    *((m, ROWS, split, 1) for m in (16, 32) for split in (1, 2, 4, 8)),
    *((m, ROWS, split, 1) for m in (64, 128) for split in (2, 4, 8)),
    (16, ROWS, 4, 2), (32, ROWS, 4, 2), (128, 2 * ROWS, 4, 1))
WAYS = (("fp32", None, None), ("e4m3", "bf16", "gelu"), ("bf16", "bf16", "relu"), ("fp32", "bf16", "silu"),
        ("e4m3", None, None), ("bf16", "fp32", "gelu"))  # out, bias, activation


def traits(spec: Fp8Spec, config: SmallMFp8Config) -> frozenset:
    """As ``fp8.catalog.traits``."""
    shape = spec.promote, config.m, config.rows, config.split, config.shared_bytes(spec) <= SLOT_BYTES
    out = spec.out if BYTES[spec.out] != 2 else "16 bits"
    curved = "curved" if spec.activation not in (None, "relu") else "bias" if spec.bias or spec.activation else "plain"
    return frozenset({(shape, "scales", spec.scale_b), (shape[1:], "out", out), (shape[1:], "epilogue", curved)})


def shipped() -> list[Shipped]:
    """Every shape that the plan has with every granularity, and with every other way out: all ``traits``."""
    every = [Fp8Spec(**scales_of(s), promote=p) for s in PRODUCTS for p in (False, True) if p or s in ("tensor", "row")]
    cases = []
    for i, shape in enumerate(SHAPES):
        specs = [spec for spec in every if spec.promote or shape[1] == ROWS]
        cases += [(spec, shape) for spec in specs]
        for j, (out, bias, activation) in enumerate(WAYS):
            cases.append((replace(specs[(i + j) % len(specs)], out=out, bias=bias, activation=activation), shape))
    return [_shipped(spec, *shape) for spec, shape in cases]


def _shipped(spec, m, rows, split, places):
    config = fit_to_spec(SmallMFp8Config(m, rows, split, pdl=True), replace(spec, store="direct"), places)
    words = ["fp8_gemm", pair_name(spec) + ("_promoted" if spec.promote else ""), spec.out]
    words += [f"bias_{spec.activation}"] * (spec.bias is not None) + [config.name]
    quick = (spec, m, rows, split, places) == QUICK
    return Shipped("_".join(words), recipe(spec, config), expectation(spec, config), quick)


QUICK = Fp8Spec(**scales_of("1x128_128x128"), promote=True), 16, ROWS, 4, 1
