"""The recipes of this package that the SASS tests look at, and what their machine code must show."""
from .. import runtime
from ..testing.expectation import Expectation
from .ops import recipe
from .plan import Config, plan, smem_bytes
from .spec import WIDTH, NormSpec

SIZES = (1024, 4096, 8192, 16384, 32768, 65536, 131072, 262144)
KINDS = ("rmsnorm", "layernorm")


def shipped() -> list:
    """Every size of the tables and both kinds, each type once as x, weight and bias, and rows that do not divide."""
    specs = [NormSpec("rmsnorm", N, "bf16", w, None, 8) for N in SIZES for w in ("bf16", "fp32")]
    specs += [NormSpec("layernorm", N, "bf16", w, w, 8) for N in SIZES for w in ("bf16", "fp32")]
    specs += [NormSpec("layernorm", N, "bf16", "fp32", None, 8) for N in SIZES]
    specs += [NormSpec(kind, N, "fp32", "fp32", None, 4) for kind in KINDS for N in (1024, 4096, 32768, 262144)]
    specs += [NormSpec(kind, 4096, x, w, b, 128 // WIDTH[x]) for kind in KINDS for x, w, b in (
        ("fp16", "fp16", None), ("bf16", None, None), ("fp16", "fp32", "bf16"), ("fp32", "bf16", "fp16"))]
    specs += [NormSpec(kind, N, x, x, x, v) for kind in KINDS for N, x, v in (
        (1, "bf16", 1), (7, "fp32", 1), (64, "bf16", 8), (128, "fp16", 8), (1000, "bf16", 8), (4100, "fp16", 4),
        (4098, "bf16", 2), (65537, "bf16", 1), (262143, "fp32", 1))]
    quick = {(kind, N) for kind in KINDS for N in (4096, 262144, 7)}
    return [runtime.Shipped(_name(s), recipe(s), expectation(s, plan(s)), quick=(s.kind, s.N) in quick) for s in specs]


def _name(s: NormSpec) -> str:
    vectors = "".join(f"-{letter}{dtype}" for letter, dtype in (("w", s.weight), ("b", s.bias)) if dtype)
    return f"{s.kind}-{s.x}-n{s.N}{vectors}-v{s.vector}"


def expectation(spec: NormSpec, config: Config) -> Expectation:
    """Accesses as wide as the spec allows, enough room for every thread, no memory but what the plan counts."""
    t, bits = config.tile(spec), spec.vector * spec.width
    if bits < 128:
        wide = (f"LDG.E.{bits}", f"STG.E.{bits}") if bits == 64 else ()
    elif config.load == "shared":
        wide = ("LDGSTS.E.128" if config.split else "LDGSTS.E.BYPASS.128", "STG.E.128")
    else:  # no allocation in L1, evicted first
        wide = ("LDG.E.NA.128", "STG.E.EF.128")
    exchange = ("STAS", "UCGABAR_ARV") if t.cluster > 1 else ("SHFL",)
    # 2048 threads on an SM; a quarter of them must fit at once to cover the latency of memory, a block at least
    registers = min(128, 65536 // t.threads // 8 * 8)
    return Expectation(instructions=(*wide, *exchange), registers=registers, smem=smem_bytes(spec, config) + 2048)
