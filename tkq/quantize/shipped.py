"""The quantiser's kernels that the tests of machine code cover."""
from ..norms.plan import plan
from ..norms.spec import NormSpec
from ..runtime.recipe import Recipe, Shipped
from ..testing.expectation import Expectation
from .spec import TileSpec

ROW_LENGTHS = (1024, 4096, 8192, 28672)


def rows_recipe(spec: NormSpec) -> Recipe:
    return Recipe("tkq.quantize.rows:build", (spec, plan(spec)))


def tiles_recipe(spec: TileSpec) -> Recipe:
    return Recipe(f"tkq.quantize.{'lines' if spec.granularity == 'row' else 'tiles'}:build", (spec,))


def shipped() -> list[Shipped]:
    """Each granularity, with its transpose and without, for whole vectors; and narrow ones."""
    found = []
    for n in ROW_LENGTHS:
        spec = NormSpec("rmsnorm", n, "bf16", vector=8, out="e4m3", scale="row")
        found.append(Shipped(f"quantize_row_bf16_{n}", rows_recipe(spec), Expectation(instructions=("LDG.E", "STG.E")),
                             n == 4096))
    for granularity in ("tensor", "block", "tile"):
        for x in ("bf16", "fp32"):
            for transpose in (False, True):
                for wide in (True, False):
                    spec = TileSpec(granularity, x, transpose=transpose, wide=wide, wide_t=wide)
                    name = f"quantize_{granularity}_{x}" + "_transpose" * transpose + "_narrow" * (not wide)
                    wanted = ("LDG.E", "STG.E.EF.64") if wide else ("LDG.E", "STG.E.U8")
                    four_blocks = 64 if x == "bf16" and wide else 255  # run on a processor
                    found.append(Shipped(name, tiles_recipe(spec),
                                         Expectation(instructions=wanted, registers=four_blocks),
                                         x == "bf16" and wide and transpose and granularity == "block"))
    found.append(Shipped("quantize_amax_bf16", tiles_recipe(TileSpec("tensor", step="amax")),
                         Expectation(instructions=("LDG.E",))))
    for x in ("bf16", "fp32"):
        for wide in (True, False):
            for step, wanted in (("amax", "REDG.E.MAX"), ("quantise", "STG.E.EF.64" if wide else "STG.E.U8")):
                spec = TileSpec("row", x, transpose=True, wide=wide, wide_t=wide or step == "amax", step=step)
                name = f"quantize_row_{x}_transpose_{step}" + "_narrow" * (not wide)
                found.append(Shipped(name, tiles_recipe(spec),
                                     Expectation(instructions=("LDG.E", wanted),
                                                 registers=64 if x == "bf16" and wide else 255)))
    return found
