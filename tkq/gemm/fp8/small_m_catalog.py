"""Every small-M float8 kernel that the tests of machine code cover, and what its machine code must show. Pure
Python."""
from dataclasses import replace

from ...granularity import PRODUCTS, pair_name, scales_of
from ...runtime.compile.expectation import REGISTER_FILE, Expectation
from ...runtime.compile.recipe import Shipped
from ..dense.small_m_config import SLOT_BYTES
from ..dense.small_m_plan import fit_to_spec
from .config import STEP
from .small_m_config import SmallMFp8Config
from .small_m_plan import ROWS, recipe
from .spec import BYTES, Fp8Spec

SHAPES = (  # m, rows, split, blocks on an SM
    *((m, ROWS, split, 1) for m in (16, 32) for split in (1, 2, 4, 8)),
    *((m, ROWS, split, 1) for m in (64, 128) for split in (2, 4, 8)),
    (16, ROWS, 4, 2), (32, ROWS, 4, 2), (128, 2 * ROWS, 4, 1))
WAYS = (("fp32", None, None), ("e4m3", "bf16", "gelu"), ("bf16", "bf16", "relu"), ("fp32", "bf16", "silu"),
        ("e4m3", None, None), ("bf16", "fp32", "gelu"))  # out, bias, activation
QUICK = Fp8Spec(**scales_of("1x128_128x128"), promote=True), 16, ROWS, 4, 1


def expectation(spec: Fp8Spec, config: SmallMFp8Config) -> Expectation:
    """What its machine code must show: registers and shared memory for as many blocks on an SM as the stages
    leave room for."""
    places = 2 if config.shared_bytes(spec) <= SLOT_BYTES else 1
    wanted = ("UTMALDG", "STG", *["LDGSTS"] * spec.per_step)
    registers = min(255, REGISTER_FILE // places // config.threads // 8 * 8)
    return Expectation(tensor=STEP // 32, waits_per_mma=0.5, instructions=wanted, registers=registers,
                       smem=2 // places * SLOT_BYTES + 1024)


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
