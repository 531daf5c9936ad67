"""The recipes of this package that the SASS tests look at, and what their machine code must show."""
from .. import runtime
from ..rows.one_pass import plan as row_plan
from ..runtime.compile.expectation import Expectation
from .launch import recipe, reduce_recipe, scale_recipe
from .plan import StreamingConfig, plan, smem_bytes
from .spec import KINDS, CrossEntropySpec, ReduceSpec, ScaleSpec

SIZES = (1024, 4096, 8192, 16384, 32768, 65536, 131072, 262144)
EVERYTHING = dict(weight="fp32", smoothing=True, softcap=True)


def shipped() -> list:
    """Every size of the tables, each kind; each type, target and option once; rows that do not divide."""
    specs = [CrossEntropySpec(kind, N, "bf16", vector=8, part=kind == "fused", reduction=reduction)
             for kind, reduction in (("forward", "none"), ("fused", "none"), ("backward", "mean")) for N in SIZES]
    for kind, part in (("forward", False), ("fused", True), ("backward", False)):
        specs += [CrossEntropySpec(kind, N, x, target, vector=v, shifted=s, part=part, **options)
                  for N, x, target, v, s, options in (
                      (50257, "bf16", "int64", 8, True, {}), (128256, "bf16", "int64", 8, False, {}),
                      (50257, "fp32", "int32", 4, True, EVERYTHING), (4096, "fp16", "int64", 8, False, EVERYTHING),
                      (131072, "bf16", "int64", 8, False, EVERYTHING), (524288, "fp32", "int64", 4, False, {}),
                      (1, "bf16", "int64", 1, False, {}), (7, "fp32", "int32", 1, False, {}))]
    specs += [CrossEntropySpec(kind, 128256, "bf16", reduction=reduction, vector=8, part=True)
              for kind, reduction in (("forward", "none"), ("backward", "mean"), ("backward", "none"))]
    specs += [CrossEntropySpec("forward", N, "bf16", vector=8, save=False) for N in (4096, 131072)]
    specs += [CrossEntropySpec("forward", 4096, "bf16", weight=w, reduction=reduction, vector=8)
              for reduction, w in (("sum", None), ("mean", None), ("mean", "bf16"))]
    specs += [CrossEntropySpec("forward", N, "bf16", weight=w, reduction=reduction, vector=8, save=save, once=True)
              for N, reduction, w, save in ((256, "mean", None, False), (4096, "mean", "fp32", True),
                                            (131072, "sum", None, False))]
    quick = {("fused", 4096, "none", None), ("backward", 4096, "mean", None)}
    quick |= {(kind, 50257, "none", None) for kind in KINDS}
    found = [runtime.Shipped(_name(s), recipe(s), expectation(s),
                             s.x == "bf16" and (s.kind, s.N, s.reduction, s.weight) in quick) for s in specs]
    totals = [ReduceSpec(True), ReduceSpec(True, False), ReduceSpec(False), ReduceSpec(True, True, "int32", "bf16")]
    found += [runtime.Shipped(_total_name(s), reduce_recipe(s),
                              Expectation(instructions=("STAS", "ACQBULK"), smem=4096))
              for s in totals]
    found += [runtime.Shipped(f"scale-{s.x}-n{s.N}", scale_recipe(s), Expectation(instructions=("LDG.E.128",)))
              for s in (ScaleSpec(4096, "bf16", 8), ScaleSpec(4096, "fp16", 8))]
    return found


def _name(s: CrossEntropySpec) -> str:
    options = [s.target, s.weight and f"w{s.weight}", s.smoothing and "smoothing", s.softcap and "softcap",
               s.shifted and "shifted", s.part and "part", "alone" if not s.save else "", "once" if s.once else "",
               f"v{s.vector}"]
    return "-".join(["cross_entropy_" + s.kind, s.x, f"n{s.N}", s.reduction, *filter(None, options)])


def _total_name(s: ReduceSpec) -> str:
    return "-".join(["total", "mean" if s.mean else "sum", "losses" if s.losses else "weights", s.target,
                     s.weight or "unweighted"])


def expectation(spec: CrossEntropySpec) -> Expectation:
    """Accesses as wide as the spec allows, enough room for every thread, no memory but what the plan counts."""
    config = plan(spec)
    if spec.kind == "forward" and spec.reduction != "none" and not spec.once:  # holds of both kernels
        return Expectation(instructions=("SHFL",), registers=64, smem=4096)
    t, wide = row_plan.tile(spec, config), []
    if spec.vector * spec.width == 128:
        # a ring's copies go through L1: at N 32768 and 131072 0.997 and 0.993 of QuACK, past it 0.993 and 0.995
        through = "LDGSTS.E.LTC128B.128" if isinstance(config, StreamingConfig) else "LDGSTS.E.128"
        held = "LDG.E.NA.128" if spec.kind == "forward" else "LDG.E.128"  # rows that are only read go past L1
        wide += [held if config.load == "registers" else through]
        if spec.kind != "forward":
            wide += ["STG.E.128"]
    if spec.kind != "backward":
        wide += ["STAS", "UCGABAR_ARV"] if t.cluster > 1 else ["SHFL"]
    if spec.once:
        wide += ["ATOMG.E.INC.STRONG.GPU", "MEMBAR.ALL.GPU"]
    # 2048 threads on an SM; a quarter of them must fit at once to cover the latency of memory, a block at least
    registers = min(128, 65536 // t.threads // 8 * 8)
    return Expectation(instructions=tuple(wide) or ("STG",), registers=registers,
                       smem=smem_bytes(spec, config) + 2048)
