"""The quantiser's kernels that the tests of machine code cover."""
from ..norms.plan import plan
from ..norms.spec import NormSpec
from ..runtime.recipe import Recipe, Shipped
from ..testing.expectation import Expectation
from .spec import TileSpec

ROW_LENGTHS = (1024, 4096, 8192, 28672)
TWICE = ("tensor", "row")  # which read x once for what is largest, tile by tile


def rows_recipe(spec: NormSpec) -> Recipe:
    return Recipe("tkq.quantize.rows:build", (spec, plan(spec)))


def tiles_recipe(spec: TileSpec, few: bool = False) -> Recipe:
    """few: of at most FEW tiles."""
    twice = "together" if few else "twice"
    return Recipe(f"tkq.quantize.{twice if spec.granularity in TWICE else 'tiles'}:build", (spec,))


def shipped() -> list[Shipped]:
    """Each granularity, with its transpose and without, for whole vectors; and narrow ones."""
    found = []
    for n in ROW_LENGTHS:
        spec = NormSpec("rmsnorm", n, "bf16", vector=8, out="e4m3", scale="row")
        wanted = ["LDG.E", "STG.E"] + ["UCGABAR_WAIT"] * (plan(spec).cluster > 1)  # before anything is sent
        found.append(Shipped(f"quantize_row_bf16_{n}", rows_recipe(spec), Expectation(instructions=tuple(wanted)),
                             n == 4096))
    for granularity in ("tensor", "row", "block", "tile"):
        for x in ("bf16", "fp32"):
            for transpose in (False, True):
                for wide in (True, False):
                    spec = TileSpec(granularity, x, transpose=transpose, wide=wide, wide_t=wide)
                    name = "_lines" * (granularity == "row") + "_transpose" * transpose + "_narrow" * (not wide)
                    found.append(Shipped(f"quantize_{granularity}_{x}{name}", tiles_recipe(spec), _expectation(spec),
                                         x == "bf16" and wide and transpose and granularity == "row"))
                    # rows alone come here only where they are so long that they have more than FEW tiles
                    if granularity == "tensor" or (granularity == "row" and transpose):
                        wanted = Expectation(instructions=("LDG.E", "REDG.E.MAX", "UCGABAR_WAIT", _written(spec)))
                        found.append(Shipped(f"{found[-1].name}_together", tiles_recipe(spec, few=True), wanted))
    return found


def _expectation(spec: TileSpec) -> Expectation:
    """Of a kernel of tiles, and of those that find amax for it."""
    four_blocks = 64 if spec.x == "bf16" and spec.wide else 255  # registers: so many blocks run on a processor
    others = (("clear", Expectation(instructions=("STG.E",))),
              ("qNone", Expectation(instructions=("LDG.E", "REDG.E.MAX"), registers=four_blocks)))
    return Expectation(instructions=("LDG.E", _written(spec)), registers=four_blocks, others=others)


def _written(spec: TileSpec) -> str:
    return "STG.E.EF.64" if spec.wide else "STG.E.U8"
