"""The recipes of this package that the SASS tests look at, and what their machine code must show."""
from .. import runtime
from ..dtypes import WIDTH
from ..rows.persistent import plan as rows
from ..runtime.compile.expectation import Expectation
from . import fp8_persistent_plan, persistent_plan
from .backward import per_head_ops, per_head_plan
from .backward.per_head_plan import PerHeadSpec
from .config import Config, smem_bytes
from .launch import recipe
from .plan import plan
from .shipped_sizes import KINDS, SIZES
from .spec import OUT_WIDTH, NormSpec


def shipped() -> list:
    return [*map(_shipped, (*plain(), *with_options(), *quantised())), *_per_head_backward()]


def _shipped(s: NormSpec):
    name = _name(s)
    for planner in (persistent_plan, fp8_persistent_plan):
        row_plan = planner.planned(s)
        if row_plan is not None:
            return runtime.Shipped(name, planner.recipe(s, row_plan), persistent_expectation(s, row_plan),
                                   quick=name in QUICK)
    return runtime.Shipped(name, recipe(s), expectation(s, plan(s)), quick=name in QUICK)


def persistent_expectation(spec: NormSpec, row_plan) -> Expectation:
    """Of persistent kernels: bulk copies in, whole vectors from shared memory, an exchange through the cluster if one
    is there, no register too many."""
    exchange = ("STAS",) if row_plan.cluster > 1 else ("SHFL",)
    convert = ("F2FP.SATFINITE.E4M3", "STG.E.64") if spec.scale else ()
    shape = (fp8_persistent_plan if spec.scale else persistent_plan).shape(spec)
    return Expectation(instructions=("UBLKCP", "STG.E", "LDS.128", "LDG.E.128", *exchange, *convert),
                       registers=row_plan.launch_registers, smem=rows.smem_bytes(shape, row_plan) + 2048)


def plain() -> list:
    """Every size of the tables and both kinds, each type once as x, weight and bias, and rows that do not divide."""
    specs = [NormSpec("rmsnorm", N, "bf16", w, None, 8) for N in SIZES for w in ("bf16", "fp32")]
    specs += [NormSpec("layernorm", N, "bf16", w, w, 8) for N in SIZES for w in ("bf16", "fp32")]
    specs += [NormSpec("layernorm", N, "bf16", "fp32", None, 8) for N in SIZES]
    specs += [NormSpec("layernorm", N, "bf16", "bf16", None, 8) for N in (4096, 131072, 262144)]
    specs += [NormSpec(kind, N, "fp32", "fp32", None, 4) for kind in KINDS for N in (1024, 4096, 32768, 262144)]
    specs += [NormSpec(kind, 4096, x, w, b, 128 // WIDTH[x]) for kind in KINDS for x, w, b in (
        ("fp16", "fp16", None), ("bf16", None, None), ("fp16", "fp32", "bf16"), ("fp32", "bf16", "fp16"))]
    return specs + [NormSpec(kind, N, x, x, x, v) for kind in KINDS for N, x, v in ODD]


ODD = ((1, "bf16", 1), (7, "fp32", 1), (64, "bf16", 8), (128, "fp16", 8), (1000, "bf16", 8), (4100, "fp16", 4),
       (4098, "bf16", 2), (65537, "bf16", 1), (262143, "fp32", 1))


def with_options() -> list:
    """With a residual of each type at every size, as inference and training call it; training without a residual; each
    other option; rows that do not divide; weights of heads."""
    bf16, fp32 = dict(residual="bf16", total="bf16"), dict(residual="fp32", total="fp32")
    specs = [NormSpec("rmsnorm", N, "bf16", "bf16", None, 8, **bf16, stats=s) for N in SIZES for s in (False, True)]
    specs += [NormSpec("layernorm", N, "bf16", "fp32", "fp32", 8, **bf16, stats=True) for N in SIZES]
    specs += [NormSpec(kind, N, "bf16", "bf16", None, 4, **fp32) for kind in KINDS for N in (1024, 4096, 32768, 262144)]
    specs += [NormSpec(kind, N, "fp32", "fp32", "fp32", 4, **fp32, stats=True) for kind in KINDS
              for N in (4096, 32768, 262144)]
    specs += [NormSpec("rmsnorm", N, "bf16", "bf16", None, 8, stats=True) for N in SIZES]
    specs += [NormSpec("layernorm", N, "bf16", "bf16", "bf16", 8, stats=True) for N in SIZES]
    specs += [NormSpec("rmsnorm", 4096, "bf16", "bf16", None, 8, offset=True),
              NormSpec("rmsnorm", 4096, "fp32", "fp32", None, 4, out="bf16", total="fp16"),
              NormSpec("rmsnorm", 4096, "bf16", "bf16", None, 4, out="fp32")]
    specs += [NormSpec(kind, N, x, x, x, v, residual=x, total=x, stats=True) for kind in KINDS for N, x, v in ODD]
    specs += [NormSpec("rmsnorm", N, "bf16", "bf16", None, 8, heads=heads) for N in (64, 128, 256, 1024)
              for heads in ("rows", "weight")]
    specs += [NormSpec("layernorm", N, "bf16", "bf16", "bf16", 8, heads="weight") for N in (64, 128, 256, 1024)]
    return specs + [NormSpec(kind, 128, "bf16", "fp32", "fp32", 4, heads="weight", residual="fp32", total="fp32",
                             offset=True, stats=True) for kind in KINDS]


def quantised() -> list:
    """Both granularities at every size, with a residual too; float32 rows; rows that do not divide."""
    q = [dict(out="e4m3", scale=scale) for scale in ("row", "1x128")]
    specs = [NormSpec("rmsnorm", N, "bf16", "bf16", None, 8, **o) for N in SIZES for o in q]
    specs += [NormSpec("rmsnorm", N, "bf16", "bf16", None, 8, "bf16", "bf16", **o) for N in SIZES for o in q]
    specs += [NormSpec("layernorm", N, "bf16", "fp32", "fp32", 8, **o) for N in SIZES for o in q]
    specs += [NormSpec("layernorm", N, "bf16", "bf16", None, 8, **o) for N in (100008, 131072, 262144) for o in q]
    specs += [NormSpec("rmsnorm", N, "bf16", "fp32", "fp32", 8, **o) for N in SIZES[3:] for o in q]
    specs += [NormSpec("rmsnorm", 12288, "bf16", "fp32", "fp32", 8, **q[0]),
              NormSpec("rmsnorm", 16384, "bf16", "fp32", None, 8, **q[1]),
              NormSpec("layernorm", 20008, "bf16", "bf16", "bf16", 8, **q[0])]
    specs += [NormSpec("layernorm", 262144, "bf16", "bf16", None, 8, "bf16", "bf16", **q[0])]
    specs += [NormSpec(kind, 200008, "bf16", "fp32", "fp32", 8, **o) for kind in KINDS for o in q]
    specs += [NormSpec(kind, N, "bf16", "fp32", "fp32", 8, "bf16", "bf16", **o) for kind in KINDS
              for N, o in ((131072, q[0]), (262144, q[1]))]
    specs += [NormSpec("layernorm", N, "fp32", "fp32", "fp32", 4, residual="fp32", total="fp32", **o)
              for N in (4096, 32768, 262144) for o in q]
    specs += [NormSpec(kind, N, x, x, x, v, residual=x, total=x, **o) for kind in KINDS for N, x, v in ODD for o in q]
    return specs + [NormSpec("rmsnorm", 128, "bf16", "bf16", None, 8, heads="weight", **q[0])]


QUICK = ("rmsnorm-bf16-n4096-wbf16-v8", "rmsnorm-bf16-n262144-wbf16-v8", "layernorm-bf16-n4096-wfp32-v8",
         "layernorm-fp32-n7-wfp32-bfp32-v1",
         "rmsnorm-bf16-n4096-wbf16-rbf16-tbf16-stats-v8", "layernorm-fp32-n262144-wfp32-bfp32-rfp32-tfp32-stats-v4",
         "rmsnorm-bf16-n4096-wbf16-row-v8", "rmsnorm-bf16-n4096-wbf16-1x128-v8",
         "layernorm-bf16-n262144-wfp32-bfp32-row-v8", "layernorm-bf16-n65537-wbf16-bbf16-rbf16-tbf16-1x128-v1",
         "rmsnorm-bf16-n128-wbf16-headsweight-v8")


def _name(s: NormSpec) -> str:
    given = (("w", s.weight), ("b", s.bias), ("r", s.residual), ("t", s.total), ("o", None if s.scale else s.out),
             ("", s.scale), ("", s.offset and "offset"), ("", s.stats and "stats"), ("heads", s.heads))
    return f"{s.kind}-{s.x}-n{s.N}{''.join(f'-{letter}{word}' for letter, word in given if word)}-v{s.vector}"


def expectation(spec: NormSpec, config: Config) -> Expectation:
    """Accesses as wide as the spec allows, enough room for every thread, no memory but what the plan counts."""
    t = config.tile(spec)
    loads = [spec.vector * WIDTH[d] for d in (spec.x, spec.residual) if d]
    stores = [spec.vector * OUT_WIDTH[d] for d in (spec.result, spec.total) if d]
    if config.load == "shared":
        past_l1 = "" if config.split else "BYPASS."
        wide = [f"LDGSTS.E.{past_l1 if bits == 128 else ''}{bits}" for bits in loads if bits > 32]
        wide += [f"STG.E.{bits}" for bits in stores if bits > 32]
    else:
        wide = [f"{op}.{bits}" for op, widths in (("LDG.E", loads), ("STG.E", stores)) for bits in widths if bits > 32]
    exchange = ("STAS", "UCGABAR_ARV") if t.cluster > 1 else ("SHFL",)
    convert = ("F2FP.SATFINITE.E4M3",) if spec.scale else ()
    # 2048 threads on an SM; a quarter of them must fit at once to cover the latency of memory, a block at least
    registers = min(128, 65536 // (max(1, config.min_blocks_per_sm) * t.threads) // 8 * 8)
    return Expectation(instructions=(*wide, *exchange, *convert), registers=registers,
                       smem=smem_bytes(spec, config) + 2048)


def _per_head_backward() -> list:
    """Heads of usual sizes with the weight trained and frozen, every other option, the longest, and an odd one."""
    usual = ("bf16", "bf16", "bf16", "bf16", None, None)
    rms, layer = KINDS
    specs = [PerHeadSpec(rms, D, *usual, dweight, None, False, 8) for D in (64, 128, 256) for dweight in ("bf16", None)]
    specs += [PerHeadSpec(layer, D, *usual, dweight, dweight, False, 8) for D, dweight in ((64, "bf16"), (128, "bf16"),
                                                                                        (128, None), (256, "bf16"))]
    specs += [s for kind in KINDS for s in (
        PerHeadSpec(kind, 128, "fp16", "bf16", "fp32", "bf16", "fp32", "fp32", "fp32", "fp32", True, 4),
        PerHeadSpec(kind, per_head_plan.MAX_D, *usual, "bf16", "bf16", False, 8),
        PerHeadSpec(kind, per_head_plan.MAX_D, *["fp32"] * 8, True, 4),
        PerHeadSpec(kind, 33, *usual, "bf16", None, False, 1))]
    found = []
    for s in specs:
        given = "".join(f"-{n}{t}" for n, t in (("r", s.dresidual), ("dw", s.dweight), ("db", s.dbias)) if t)
        wanted = Expectation(instructions=("LDG.E", "STG.E"), registers=128, smem=4096)  # of two kernels alike
        found.append(runtime.Shipped(f"{s.kind}_per_head_backward-{s.x}-d{s.D}{given}-v{s.vector}",
                                     per_head_ops.recipe(s),
                                     wanted, quick=s.kind == rms and s.D == 128 and s.dweight == "bf16"))
    return found
