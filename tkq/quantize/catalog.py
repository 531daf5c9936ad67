"""The quantiser's kernels that the tests of machine code cover."""
from ..norms.plan import plan
from ..norms.spec import NormSpec
from ..runtime.compile.expectation import Expectation
from ..runtime.compile.recipe import Recipe, Shipped
from .spec import GRANULARITIES, TileSpec

ROW_LENGTHS = (1024, 4096, 8192, 28672)
TWICE = ("tensor", "row")  # which read x once for what is largest, tile by tile
_MODULES = {"blocks": "group128", "claimed": "two_phase", "kept": "two_phase_cooperative",
            "twice": "two_phase_launches"}


def rows_recipe(spec: NormSpec) -> Recipe:
    return Recipe("tkq.quantize.rowwise:build", (spec, plan(spec)))


def way(spec: TileSpec, tiles: int, num_sms: int) -> str:
    """How so many tiles are quantised, see ``_MODULES``."""
    if spec.granularity not in TWICE:
        return "blocks" if spec.granularity == "1x128" and not spec.transpose else "tiles"
    if not is_ticketed(spec.granularity, spec.transpose):
        return "twice"
    return "kept" if tiles <= cooperative_tiles(spec) * num_sms else "claimed"


def cooperative_tiles(spec: TileSpec) -> int:
    """Tiles a processor that `kept` takes: half of what fits by its registers, so that kernels on other streams seldom
    keep it waiting."""
    return 2 if spec.x in ("bf16", "fp16") and spec.wide and spec.wide_t else 1


def is_ticketed(granularity: str, transpose: bool) -> bool:
    """Is x read twice because of what was asked for, and not because rows are longer than a kernel can hold?"""
    return granularity == "tensor" or (granularity == "row" and bool(transpose))


def tiles_recipe(spec: TileSpec, way: str = "tiles") -> Recipe:
    return Recipe(f"tkq.quantize.{_MODULES.get(way, way)}:build", (spec,))


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
                    for module in dict.fromkeys(way(spec, tiles, 132) for tiles in (1 << 20, 1)):
                        quick = x == "bf16" and wide and transpose and granularity == "row"
                        found.append(Shipped(name + "_kept" * (module == "kept"), tiles_recipe(spec, module),
                                             _expectation(spec, module), quick))
    return found


def _expectation(spec: TileSpec, module: str) -> Expectation:
    """Of a kernel of tiles, and of those that find amax for it."""
    four_blocks = 64 if spec.x == "bf16" and spec.wide else 255  # registers: so many blocks run on a processor
    if module in ("claimed", "kept"):
        wanted = ["LDG.E", "REDG.E.MAX", "REDG.E.ADD", "LDG.E.STRONG.GPU", _written(spec)]
        wanted += ["ATOMG.E.ADD"] * (module == "claimed")
        return Expectation(instructions=tuple(wanted), registers=min(four_blocks, 128 if module == "kept" else 255))
    others = (("clear", Expectation(instructions=("STG.E",))),
              ("qNone", Expectation(instructions=("LDG.E", "REDG.E.MAX"), registers=four_blocks)))
    return Expectation(instructions=("LDG.E", _written(spec)), registers=four_blocks,
                       others=others if module == "twice" else ())


def _written(spec: TileSpec) -> str:
    return "STG.E.64" if spec.wide else "STG.E.U8"
