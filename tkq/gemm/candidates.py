"""What ``tkq.tune`` chooses among, for each kind of product: configurations, the plan's first. Pure Python."""
import itertools
from contextlib import suppress
from dataclasses import replace

from .dense import plan
from .dense import small_m_plan as narrow_plan
from .dense.config import Config
from .dense.small_m_config import SLOT_BYTES, WIDTHS, NarrowConfig, takes
from .dense.wave_sync_config import PacedConfig
from .fp8 import plan as fp8_plan
from .fp8 import small_m_plan
from .fp8.config import Fp8Config, PacedFp8Config
from .fp8.small_m_config import NarrowFp8Config
from .grouped import spec as grouped_spec

CLASSES = {"gemm": {"Config": Config, "NarrowConfig": NarrowConfig, "PacedConfig": PacedConfig},
           "fp8_gemm": {x.__name__: x for x in (Fp8Config, NarrowFp8Config, PacedFp8Config)},
           "grouped_gemm": {"Fp8Config": Fp8Config}}
_FITTED = {"gemm": lambda config, spec: config if isinstance(config, NarrowConfig) else plan.fitted(config, spec),
           "fp8_gemm": fp8_plan.fitted, "grouped_gemm": grouped_spec.fitted}
GROUPS = (4, 8, 16)  # columns of tiles to a band of the tile order
FEW_ROUNDS = 16  # of tiles: blocks that take no more keep pace by themselves
SLACK = 1.5  # tiles that the plan's model says take longer than so many times the best are not tried


def of_gemm(spec, M: int, N: int, K: int, processors: int, batches: int = 1) -> list:
    """For ``tkq.gemm``: one alone where operands come in element by element."""
    if spec.load == "elements":
        return []
    planned = plan.launch(spec, M, N, K, processors, batches=batches)[0].args[1]
    few = M <= narrow_plan.MOST_ROWS and takes(spec)
    parts = 2 if spec.epilogue.gate else 1
    found = [planned, *(_narrow(spec, M, NarrowConfig(parts=parts)) if few else ())]
    table = plan.TILES[-1:] if few else [x for x in plan.TILES if x.m * (x.cluster - 1) < M]
    tiles = _worth(table, lambda x: plan.cycles(x, M, N, K, processors, batches))
    for tile in tiles:
        for group in GROUPS:
            found.append(replace(plan.with_epilogue(tile, spec), group=group))
    best = replace(plan.with_epilogue(tiles[0], spec), group=tiles[0].group)
    found += [replace(best, hold=False, spread=0, late=False), replace(best, spread=0, late=False)]
    found += [replace(best, spread=1), replace(best, spread=2), replace(best, pdl=not best.pdl)]
    return _fitting(found, lambda x: _FITTED["gemm"](x, spec))


def _narrow(spec, M, config):
    """Like a configuration, of every height of B and number of parts of K; with room for two blocks on a processor, and
    for one."""
    m = next((width for width in WIDTHS if width >= M), WIDTHS[-1])
    for rows, split, places in itertools.product((64, 128), (1, 2, 4, 8), (2, 1)):
        with suppress(ValueError):
            found = narrow_plan.fitted(replace(config, m=m, rows=rows, split=split), spec, places)
            if found.shared_bytes(spec) <= 2 // places * SLOT_BYTES:
                yield found


def of_fp8_gemm(spec, M: int, N: int, K: int, processors: int) -> list:
    """For ``tkq.fp8_gemm``."""
    planned = fp8_plan.plan(spec, M, N, K, processors)
    table = (*(fp8_plan.SMALL if M <= 64 else ()), *fp8_plan.table(spec))
    tiles = _worth([x for x in table if fp8_plan.of_use(x, M, N)],
                   lambda x: fp8_plan.cycles(x, M, N, K, processors, spec.promote))
    few = M <= narrow_plan.MOST_ROWS or small_m_plan.tiles(M, N, 128) <= processors
    found = [planned, *(_narrow(spec, M, NarrowFp8Config(pdl=True)) if few else ())]
    tiles = [fp8_plan.with_epilogue(tile, spec) for tile in tiles]
    found += [replace(tile, group=group) for tile in tiles for group in GROUPS]
    if not spec.promote:
        found += [x for x in fp8_plan.SHARING
                  if fp8_plan.of_use(x, M, N) and fp8_plan.rounds(x, M, N, processors) == 1]
    best = tiles[0]
    found += [replace(best, pdl=not best.pdl), replace(best, spread=0, by_warp=False)]
    if not spec.promote:
        found.append(replace(best, lag=1 - best.lag, spread=0))
    found += [replace(best, lead=lead) for lead in (0, 1, 3) if best.consumers == 2]
    if best.cluster > 1 and fp8_plan.rounds(best, M, N, processors) > FEW_ROUNDS:
        found += [fp8_plan.with_epilogue(PacedFp8Config.of(best, pace), spec) for pace in (8, 16)]
    return _fitting(found, lambda x: fp8_plan.fitted(x, spec))


def of_grouped_gemm(spec, M: int, N: int, groups: int, processors: int) -> list:
    """For ``tkq.grouped_gemm``."""
    planned = grouped_spec.plan(spec, M, N, groups, processors)
    table = grouped_spec.PROMOTED if spec.promote else grouped_spec.FAST
    found = [planned, *(replace(tile, group=group) for tile in table for group in GROUPS)]
    return _fitting(found, lambda x: grouped_spec.fitted(x, spec))


def fits(op: str, config, spec, M: int) -> bool:
    """Can a kernel take a configuration as it is, for M rows? It may be anything of the op's classes."""
    try:
        few = isinstance(config, NarrowConfig) and not config.tiled
        return _FITTED[op](config, spec) == config and not (few and config.m < M)
    except (ValueError, ArithmeticError):
        return False


def _worth(table, cycles) -> list:
    """The configurations of a table that its model does not call much slower than the best, which is the first."""
    ranked = sorted(table, key=cycles)
    return [x for x in ranked if cycles(x) <= SLACK * cycles(ranked[0])]


def _fitting(found, fitted) -> list:
    """Each once, as it fits a spec, without those that do not."""
    kept = {}
    for x in found:
        with suppress(ValueError):
            kept[fitted(x)] = None
    return list(kept)
