"""The backward recipes that the SASS tests look at, and what their machine code must show."""
from ... import runtime
from ...rows.persistent.launch import recipe_of
from ...rows.persistent.plan import RowPlan, plan, smem_bytes
from ...rows.persistent.spec import RowSpec, Stream
from ...runtime.compile.expectation import Expectation
from ..shipped_sizes import KINDS, SIZES
from .plan import steps

_CLASSES = {"rmsnorm": "RMSNormBackward", "layernorm": "LayerNormBackward"}
STATIC = 1024  # bytes of shared memory that the driver reserves


def spec(kind: str, N: int, dtype="bf16", weight="bf16", *, dx=None, dresidual_out=None, dresidual=None, columns=None,
         vector=None, bulk=True) -> RowSpec:
    """As `norm_backward` asks for it. columns: how many of dweight, dbias; by default those that the forward's usual
    parameters need."""
    loads = [Stream("dy", dtype), Stream("x", dtype)]
    loads += [Stream("dresidual_out", dresidual_out)] if dresidual_out else []
    stores = [Stream("dx", dx or dtype)] + ([Stream("dresidual", dresidual)] if dresidual else [])
    columns = (1 if kind == "rmsnorm" else 2) if columns is None else columns
    widest = max(s.width for s in (*loads, *stores))
    return RowSpec(
        "tkq.norms.backward.kernel", _CLASSES[kind], N, tuple(loads), tuple(stores),
        (Stream("weight", weight),) if weight else (), ("rstd",) if kind == "rmsnorm" else ("rstd", "mean"), (),
        tuple(Stream(name, weight or "fp32") for name in ("dweight", "dbias")[:columns]),
        vector or 128 // widest, bulk, (1,) if kind == "rmsnorm" else (2,))


def shipped() -> list:
    """Every size of the tables and both kinds; each type; what else may be asked for; rows that bulk copies cannot
    take; and of each the plans for few rows."""
    cases = [(kind, N, dict(weight=w)) for kind in KINDS for N in (64, 128, 2048, *SIZES) for w in ("bf16", "fp32")]
    cases += [(kind, 4096, dict(dtype=d, weight=w)) for kind in KINDS for d, w in (
        ("fp16", "fp16"), ("fp32", "fp32"), ("bf16", None))]
    cases += [(kind, N, dict(dtype="fp32", weight="fp32")) for kind in KINDS for N in (1024, 32768, 131072, 262144)]
    cases += [(kind, 4096, dict(columns=0)) for kind in KINDS]
    cases += [(kind, N, dict(dresidual_out=d, dresidual="fp32")) for kind in KINDS for N in (4096, 65536)
              for d in ("bf16", "fp32")]
    cases += [(kind, N, dict(vector=v, bulk=False)) for kind in KINDS for N, v in (
        (7, 1), (1001, 1), (4100, 4), (65537, 1), (262143, 1))]
    quick = {("rmsnorm", 1024), ("layernorm", 131072)}
    found = {}
    for kind, N, options in cases:
        name = f"{kind}_backward-n{N}" + "".join(f"-{key}_{value}" for key, value in options.items())
        s = spec(kind, N, **options)
        few = options.get("weight") != "fp32"
        found[name] = runtime.Shipped(name, recipe_of(s), expectation(s, plan(s.shape)), few and (kind, N) in quick)
        for elements, p in steps(s.shape)[:-1]:  # for fewer rows
            named = f"{name}-elements_{elements}"
            found[named] = runtime.Shipped(named, recipe_of(s, p), expectation(s, p))
    return list(found.values())


def expectation(s: RowSpec, p: RowPlan) -> Expectation:
    """Bulk copies and whole vectors where rows allow them, an exchange through the cluster where it is one, and as
    many registers as the plan counts with: setmaxnreg deals out what the launch took."""
    wide = () if p.direct else ("UBLKCP", "LDS", "STG.E.128", "USETMAXREG")
    exchange = ("STAS", "UCGABAR_ARV") if p.cluster > 1 else ("SHFL",)
    return Expectation(instructions=(*wide, *exchange), registers=p.launch_registers,
                       smem=smem_bytes(s.shape, p) + STATIC)
