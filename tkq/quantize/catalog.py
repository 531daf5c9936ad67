"""The quantiser's kernels that the tests of machine code cover."""
from ..norms.plan import plan
from ..norms.spec import NormSpec
from ..runtime.compile.expectation import Expectation
from ..runtime.compile.recipe import Recipe, Shipped
from .spec import GRANULARITIES, TileSpec

ROW_LENGTHS = (1024, 4096, 8192, 28672)
TWO_PHASE = ("tensor", "row")  # which read x once for what is largest, tile by tile
ONE_PHASE = {"tiles": "Tilewise", "group128": "Group128"}  # modules, and their kernels
LAUNCHES = ("separate", "ticketed", "cooperative")  # from the first phase of `two_phase` to the second


def rows_recipe(spec: NormSpec) -> Recipe:
    return Recipe("tkq.quantize.rowwise:RowQuantizer", (spec, plan(spec)))


def way(spec: TileSpec, tiles: int, num_sms: int) -> str:
    """How a number of tiles is quantised: the module of one phase, "group128" or "tiles", or one of LAUNCHES."""
    if spec.granularity not in TWO_PHASE:
        return "group128" if spec.granularity == "1x128" and not spec.transpose else "tiles"
    if not has_workspace(spec.granularity, spec.transpose):
        return "separate"
    return "cooperative" if tiles <= cooperative_tiles(spec) * num_sms else "ticketed"


def cooperative_tiles(spec: TileSpec) -> int:
    """Tiles an SM that a cooperative launch takes: half of what fits by its registers, so that kernels on other
    streams seldom keep it waiting."""
    return 2 if spec.x in ("bf16", "fp16") and spec.wide and spec.wide_t else 1


def has_workspace(granularity: str, transpose: bool) -> bool:
    """Do both phases run in one launch, which counts in a workspace? They do where x has to be read twice; where only
    rows are longer than a kernel can hold, launches are separate."""
    return granularity == "tensor" or (granularity == "row" and bool(transpose))


def tiles_recipe(spec: TileSpec, way: str = "tiles") -> Recipe:
    if way in ONE_PHASE:
        return Recipe(f"tkq.quantize.{way}:{ONE_PHASE[way]}", (spec,))
    if way == "separate":
        return Recipe("tkq.quantize.two_phase:SeparateLaunches", (spec,))
    return Recipe("tkq.quantize.two_phase:SingleLaunch", (spec, way == "cooperative"))


def shipped() -> list[Shipped]:
    """Each granularity, with its transpose and without, for whole vectors; and narrow ones."""
    found = []
    for n in ROW_LENGTHS:
        spec = NormSpec("rmsnorm", n, "bf16", vector=8, out="e4m3", scale="row")
        wanted = ["LDG.E", "STG.E"] + ["UCGABAR_WAIT"] * (plan(spec).cluster > 1)  # before anything is sent
        found.append(Shipped(f"quantize_row_bf16_{n}", rows_recipe(spec), Expectation(instructions=tuple(wanted)),
                             n == 4096))
    for granularity in GRANULARITIES:
        for x in ("bf16", "fp32"):
            for transpose in (False, True):
                for wide in (True, False):
                    spec = TileSpec(granularity, x, transpose=transpose, wide=wide, wide_t=wide)
                    name = "_row_col" * (granularity == "row") + "_transpose" * transpose + "_narrow" * (not wide)
                    name = f"quantize_{granularity}_{x}{name}"
                    for chosen in dict.fromkeys(way(spec, tiles, 132) for tiles in (1 << 20, 1)):
                        quick = x == "bf16" and wide and transpose and granularity == "row"
                        found.append(Shipped(name + "_cooperative" * (chosen == "cooperative"),
                                             tiles_recipe(spec, chosen), _expectation(spec, chosen), quick))
    return found


def _expectation(spec: TileSpec, way: str) -> Expectation:
    """Of a kernel of tiles, and of those that find amax for it."""
    four_blocks = 64 if spec.x == "bf16" and spec.wide else 255  # registers, so that four blocks fit on an SM
    if way in ("ticketed", "cooperative"):
        wanted = ["LDG.E", "REDG.E.MAX", "REDG.E.ADD", "LDG.E.STRONG.GPU", _written(spec)]
        wanted += ["ATOMG.E.ADD"] * (way == "ticketed")
        return Expectation(instructions=tuple(wanted), registers=min(four_blocks, 128 if way == "cooperative" else 255))
    others = (("clear", Expectation(instructions=("STG.E",))),
              ("qNone", Expectation(instructions=("LDG.E", "REDG.E.MAX"), registers=four_blocks)))
    return Expectation(instructions=("LDG.E", _written(spec)), registers=four_blocks,
                       others=others if way == "separate" else ())


def _written(spec: TileSpec) -> str:
    return "STG.E.64" if spec.wide else "STG.E.U8"
