"""The recipes of this package that the SASS tests look at, and what their machine code must show."""
from .. import runtime
from ..runtime.compile.expectation import Expectation
from .gated_ops import recipe as gated_recipe
from .plan import columns, held_back, past_l1, plan_rope
from .rope_launch import recipe as rope_recipe
from .spec import KINDS, WIDTH, GatedSpec, RopeSpec, widest_gated

# 2048 threads on an SM; half of them must fit at once, or too few bytes are in flight
REGISTERS = 80


def shipped() -> list:
    """Each activation forward and backward, each layout in memory, each type; rope by pairing, table, positions."""
    return [*_gated(), *_rope()]


def _gated():
    specs = [GatedSpec(kind, "bf16", "apart", 8, gradients) for kind in KINDS for gradients in (None, "both")]
    for packing in ("split", "interleaved"):
        specs += [GatedSpec("swiglu", "bf16", packing, widest_gated("bf16", packing), g, 3) for g in (None, "both")]
    specs += [GatedSpec("geglu", dtype, "apart", 128 // WIDTH[dtype], g, 3) for dtype in ("fp16", "fp32")
              for g in (None, "both")]
    specs += [GatedSpec("swiglu", "bf16", "apart", 8, g) for g in ("gate", "up")]
    specs += [GatedSpec("swiglu", dtype, packing, 1, g) for dtype in ("bf16", "fp32") for packing, g in (
        ("apart", None), ("interleaved", "both"))]
    return [runtime.Shipped(_gated_name(s), gated_recipe(s), _gated_expectation(s), quick=s is specs[0])
            for s in specs]


def _gated_name(s: GatedSpec) -> str:
    return "-".join((s.kind, s.dtype, s.packing, f"v{s.vector}", f"d{s.rank}", s.gradients or "forward"))


def _gated_expectation(s: GatedSpec) -> Expectation:
    """Loads and stores as wide as they can be."""
    times = 2 if s.packing == "interleaved" else 1
    wide, narrow = s.vector * WIDTH[s.dtype] * times, s.vector * WIDTH[s.dtype]
    wanted = ("MUFU.EX2",) if s.kind == "geglu" else ("MUFU.EX2", "MUFU.RCP")
    if narrow >= 64:
        wanted = (f"LDG.E.{wide}", f"STG.E.{wide if s.backward else narrow}", *wanted)
    return Expectation(instructions=wanted, absent=("CALL",), registers=REGISTERS, smem=2048)


def _rope():
    specs = [RopeSpec("bf16", table, 128, 0, interleaved, 8) for table in ("fp32", "bf16")
             for interleaved in (False, True)]
    specs += [RopeSpec("bf16", "fp32", 128, 0, False, 8, *positions) for positions in (
        ("token",), ("ids", "int64"), ("offsets", "int32"), ("offset", None, True), ("offsets", "int64", True),
        ("ids", "int32", True))]
    specs += [RopeSpec("bf16", "fp32", 128, 0, interleaved, 8, tensors=2) for interleaved in (False, True)]
    specs += [RopeSpec("fp16", "fp16", 32, 48, interleaved, 8) for interleaved in (False, True)]
    specs += [RopeSpec("fp32", "fp32", 64, 64, interleaved, 4) for interleaved in (False, True)]
    specs += [RopeSpec("bf16", "bf16", 10, 7, interleaved, 1) for interleaved in (False, True)]
    return [runtime.Shipped(_rope_name(s), rope_recipe(s, plan_rope(s, 32)), _rope_expectation(s), quick=s is specs[0])
            for s in specs]


def _rope_name(s: RopeSpec) -> str:
    parts = ["rope" if s.tensors == 1 else "rope_qk", s.dtype, f"r{s.rotary_dim}", f"t{s.table}",
             "interleaved" if s.interleaved else "half", s.positions]
    parts += [f"rest{s.rest}"] * bool(s.rest) + [s.index] * bool(s.index) + ["varlen"] * s.varlen
    return "-".join((*parts, f"v{s.vector}"))


def _rope_expectation(s: RopeSpec) -> Expectation:
    if s.vector * WIDTH[s.dtype] < 128:
        assert columns(s).two  # narrow accesses come in twos, whichever way pairs lie
        return Expectation(instructions=("LDG.E.U16", "STG.E.U16"), registers=REGISTERS, smem=2048)
    wide = ("LDG.E.NA.128" if past_l1(s) else "LDG.E.128", "STG.E.EF.128")
    return Expectation(instructions=wide, absent=("CALL",), registers=REGISTERS,
                       smem=held_back(plan_rope(s, 32)) + 2048)
