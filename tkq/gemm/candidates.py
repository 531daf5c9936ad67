"""What ``tkq.tune`` chooses among, for each kind of product: configurations, the plan's first. Pure Python."""
import itertools
from contextlib import suppress
from dataclasses import replace

from .dense import plan
from .dense import small_m_plan as dense_small_m_plan
from .dense.small_m_config import SLOT_BYTES, WIDTHS, SmallMConfig, takes
from .fp8 import plan as fp8_plan
from .fp8 import small_m_plan
from .fp8.small_m_config import SmallMFp8Config
from .grouped import plan as grouped_plan

GROUPS = (4, 8, 16)  # columns of tiles to a band of the tile order
FEW_WAVES = 16  # blocks with no more of them stay in step by themselves
SLACK = 1.5  # tiles that by the plan's model take longer than SLACK times the best are not tried


def of(problem, num_sms: int) -> list:
    """For a ``tkq.runtime.compile.tuned.Problem``; none where nothing is multiplied, or where there is one kernel."""
    if not all(problem.sizes):
        return []
    m, n, k, *others = problem.sizes
    if problem.op == "gemm":
        return of_gemm(problem.spec, m, n, k, num_sms, *others)
    if problem.op == "fp8_gemm":
        return of_fp8_gemm(problem.spec, m, n, k, num_sms)
    return of_grouped_gemm(problem.spec, m, n, *others, num_sms)


def of_gemm(spec, M: int, N: int, K: int, num_sms: int, batches: int = 1) -> list:
    """For ``tkq.gemm``: one alone where operands come in element by element."""
    if spec.load == "direct":
        return []
    planned = plan.planned_kernel(spec, M, N, K, num_sms, batches=batches)[0].args[1]
    few = M <= dense_small_m_plan.MOST_M and takes(spec)
    parts = 2 if spec.epilogue.gate else 1
    found = [planned, *(_small_m(spec, M, SmallMConfig(parts=parts)) if few else ())]
    table = plan.TILES[-1:] if few else [x for x in plan.TILES if x.m * (x.cluster - 1) < M]
    tiles = _worth(table, lambda x: plan.cycles(x, M, N, K, num_sms, batches))
    for tile in tiles:
        for raster_group in GROUPS:
            found.append(replace(plan.configure_epilogue(tile, spec), raster_group=raster_group))
    best = replace(plan.configure_epilogue(tiles[0], spec), raster_group=tiles[0].raster_group)
    found += [replace(best, hold_in_registers=False, overlap_epilogue=0, defer_activation=False),
              replace(best, overlap_epilogue=0, defer_activation=False)]
    found += [replace(best, overlap_epilogue=1), replace(best, overlap_epilogue=2), replace(best, pdl=not best.pdl)]
    return _fitting(found, lambda x: plan.fit_to_spec(x, spec))


def _small_m(spec, M, config):
    """Like a configuration, of every height of B and number of parts of K; with room for two blocks on an SM, and for
    one."""
    m = next((width for width in WIDTHS if width >= M), WIDTHS[-1])
    for rows, split, places in itertools.product((64, 128), (1, 2, 4, 8), (2, 1)):
        with suppress(ValueError):
            found = dense_small_m_plan.fit_to_spec(replace(config, m=m, rows=rows, split=split), spec, places)
            if found.shared_bytes(spec) <= 2 // places * SLOT_BYTES:
                yield found


def of_fp8_gemm(spec, M: int, N: int, K: int, num_sms: int) -> list:
    """For ``tkq.fp8_gemm``."""
    planned = fp8_plan.plan(spec, M, N, K, num_sms)
    table = (*(fp8_plan.SMALL if M <= 64 else ()), *fp8_plan.table(spec))
    tiles = _worth([x for x in table if fp8_plan.cluster_is_useful(x, M, N)],
                   lambda x: fp8_plan.cycles(x, M, N, K, num_sms, spec.promote))
    few = M <= dense_small_m_plan.MOST_M or small_m_plan.tiles(M, N, 128) <= num_sms
    found = [planned, *(_small_m(spec, M, SmallMFp8Config(pdl=True)) if few else ())]
    tiles = [fp8_plan.configure_epilogue(tile, spec) for tile in tiles]
    found += [replace(tile, raster_group=raster_group) for tile in tiles for raster_group in GROUPS]
    if not spec.promote:
        found += [x for x in fp8_plan.SHARING
                  if fp8_plan.cluster_is_useful(x, M, N) and fp8_plan.waves(x, M, N, num_sms) == 1]
    best = tiles[0]
    found += [replace(best, pdl=not best.pdl), replace(best, overlap_epilogue=0, store_per_warp=False)]
    if not spec.promote:
        found.append(replace(best, wgmma_in_flight=1 - best.wgmma_in_flight, overlap_epilogue=0))
    found += [replace(best, stagger_stages=stagger_stages) for stagger_stages in (0, 1, 3) if best.consumers == 2]
    if best.cluster > 1 and fp8_plan.waves(best, M, N, num_sms) > FEW_WAVES:
        found += [fp8_plan.configure_epilogue(replace(best, wave_sync=wave_sync), spec) for wave_sync in (8, 16)]
    return _fitting(found, lambda x: fp8_plan.fit_to_spec(x, spec))


def of_grouped_gemm(spec, M: int, N: int, groups: int, num_sms: int) -> list:
    """For ``tkq.grouped_gemm``."""
    planned = grouped_plan.plan(spec, M, N, groups, num_sms)
    table = grouped_plan.PROMOTED if spec.promote else grouped_plan.FAST
    found = [planned, *(replace(tile, raster_group=raster_group) for tile in table for raster_group in GROUPS)]
    return _fitting(found, lambda x: grouped_plan.fit_to_spec(x, spec))


def _worth(table, cycles) -> list:
    """The configurations of a table that its model does not call much slower than the best, which is the first."""
    ranked = sorted(table, key=cycles)
    return [x for x in ranked if cycles(x) <= SLACK * cycles(ranked[0])]


def _fitting(found, fitted) -> list:
    """Each once, as it fits a spec, without those that do not."""
    each = {}
    for x in found:
        with suppress(ValueError):
            each[fitted(x)] = None
    return list(each)
