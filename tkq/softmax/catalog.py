"""The recipes of this package that the SASS tests look at, and what their machine code must show."""
from .. import runtime
from ..rows.one_pass import plan as row_plan
from ..runtime.compile.expectation import Expectation
from .ops import recipe
from .plan import EXCHANGES, plan
from .spec import SoftmaxSpec

SIZES = (1024, 4096, 8192, 16384, 32768, 65536, 131072, 262144)


def shipped() -> list:
    """Every size of the tables, forward and backward, each type and form once, and rows that do not divide."""
    specs = [SoftmaxSpec(N, "bf16", 8, backward=b) for N in SIZES for b in (False, True)]
    specs += [SoftmaxSpec(N, "fp32", 4, backward=b) for N in (1024, 32768, 262144) for b in (False, True)]
    specs += [SoftmaxSpec(N, x, 128 // row_plan.WIDTH[x], True, b)
              for N, x in ((4096, "fp16"), (65536, "bf16"), (262144, "fp32")) for b in (False, True)]
    specs += [SoftmaxSpec(N, x, v, backward=b, shifted=s) for b in (False, True) for N, x, v, s in (
        (1, "bf16", 1, False), (7, "fp32", 1, False), (64, "bf16", 8, False), (1000, "fp16", 8, False),
        (4098, "bf16", 2, False), (101, "bf16", 8, True), (50257, "bf16", 8, True), (262143, "fp32", 4, True))]
    quick = {"softmax-bf16-n4096-v8", "softmax_backward-bf16-n4096-v8", "softmax-bf16-n262144-v8",
             "softmax-bf16-n50257-v8-shifted"}
    return [runtime.Shipped(_name(s), recipe(s), expectation(s), quick=_name(s) in quick) for s in specs]


def _name(s: SoftmaxSpec) -> str:
    kind = ("log_" if s.log else "") + "softmax" + ("_backward" if s.backward else "")
    return f"{kind}-{s.x}-n{s.N}-v{s.vector}" + ("-shifted" if s.shifted else "")


def expectation(spec: SoftmaxSpec) -> Expectation:
    """Accesses as wide as the spec allows, enough room for every thread, no memory but what the plan counts."""
    config = plan(spec)
    t, bits = row_plan.tile(spec, config), spec.vector * spec.width
    if bits < 128:
        wide = ()
    elif config.load == "shared":
        wide = ("LDGSTS.E.128", "STG.E.128")
    else:
        wide = ("LDG.E.128", "STG.E.128")
    exchange = ("STAS", "UCGABAR_ARV") if t.cluster > 1 else ("SHFL",)
    # 2048 threads on an SM; a quarter of them must fit at once to cover the latency of memory, a block at least
    registers = min(128, 65536 // t.threads // 8 * 8)
    return Expectation(instructions=(*wide, *exchange), registers=registers,
                       smem=row_plan.smem_bytes(spec, config, EXCHANGES) + 2048)
