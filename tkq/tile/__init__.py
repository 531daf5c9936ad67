"""The tiling layer that all of tkq's kernels share: ThunderKittens-shaped tiles on the CuTe DSL, Hopper only.

    import tkq.tile as tk

Its rules:
  * A tile is a frozen dataclass, a *handle*; its contents live in registers or shared memory and are written in place.
    So no tile is carried through a run-time loop or branch, and no tile name is ever rebound.
  * Operations are free functions, destination first: ``tk.mul(dst, a, b)``.
  * They are traced once and inlined; at run time the layer is not there.
  * ``.tensor`` of any tile is the CuTe tensor underneath: raw CuTe between tile operations needs nothing special.
  * Register tiles belong to a warpgroup: 64 rows, 128 threads, wgmma's layout.
  * wgmma fences and commits by itself; waiting is always explicit.
"""
import math
from types import ModuleType

from .block import (
    Role,
    assign,
    first_warp_of_group,
    init_block,
    lane_id,
    register_split,
    roles_fit,
    specialise,
    thread_in_warpgroup,
    warp_id,
    warpgroup_id,
)
from .bulk import bulk_add, bulk_commit, bulk_load, bulk_send, bulk_store, count_up, red_add4
from .dtypes import element_type, type_name
from .exp2_float8 import exp2_e4m3
from .exponentials import exp2_polynomial
from .float8 import copy_e4m3
from .grid import grid_arrive, grid_ticket, grid_wait
from .lcf import LCF, Task
from .maps import (
    COLUMN,
    add,
    add_col,
    add_row,
    apply,
    apply_narrow,
    copy,
    decay_outer,
    div_row,
    exp2,
    finite_or_zero,
    fma_outer,
    log2,
    mul,
    mul_col,
    mul_outer,
    mul_row,
    quad_sum,
    row_max,
    row_sum,
    row_sum_partial,
    sub,
    sub_row,
    tanh,
)
from .memory import (
    copy_async,
    copy_async_arrive,
    gl,
    load_async,
    load_elements,
    prefetch,
    publish,
    store_async,
    store_wait,
)
from .mma import (
    mm_AB,
    mm_ABt,
    mm_AtB,
    mm_AtBt,
    mma_AB,
    mma_ABt,
    mma_AtB,
    mma_AtBt,
    mma_commit,
    mma_fence,
    mma_wait,
)
from .naps import nap
from .pairs import (
    Pair,
    SharedPair,
    SplitPair,
    SplitSharedPair,
    complex_copy,
    complex_fma_conj,
    complex_mm_AB,
    complex_mul_narrow,
    complex_mul_powers,
    complex_mul_table,
    complex_to_table,
    factor_place,
    factors,
    fill_powers,
    narrow_four,
    pair,
    powers,
    split_pair,
)
from .register import (
    ROWS,
    ColVec,
    RegTile,
    RowVec,
    columns,
    cv,
    fill,
    first_col,
    first_row,
    left_fill,
    neg_infty,
    right_fill,
    rt,
    rt_bf,
    rt_fl,
    rt_hf,
    rv,
    zero,
)
from .schedule import Schedule, blocks_for
from .shared import SharedAllocator, SharedTile, st
from .sync import (
    WARPGROUP,
    Mailbox,
    PingPong,
    Pipe,
    Ring,
    Semaphore,
    arrive,
    arrive_at,
    arrive_cluster,
    cluster_arrive,
    cluster_arrive_relaxed,
    cluster_rank,
    cluster_sync,
    cluster_wait,
    expect_bytes,
    init,
    ring,
    store_remote,
    sync,
    sync_arrive,
    sync_block,
    wait,
)
from .transfer import (
    arrived,
    load,
    load_cols,
    load_from,
    load_rows,
    load_shared_cols,
    load_T,
    store,
    store_elements,
    store_narrow,
    store_rows,
    store_T,
)
from .triangle import apply_triangle
from .views import groups_apart, packed, ragged, ragged_store, row_groups

LOG2E, LN2 = math.log2(math.e), math.log(2.0)

__all__ = [name for name, x in list(globals().items())
           if not name.startswith("_") and not isinstance(x, ModuleType) and x is not ModuleType]


_RENAMED = {"Turns": "PingPong"}  # old names, for one minor version


def __getattr__(name):
    if name in _RENAMED:
        import warnings  # with the first old name

        warnings.warn(f"tkq.tile.{name} is now tkq.tile.{_RENAMED[name]}; the next minor version drops the old name",
                      DeprecationWarning, stacklevel=2)
        return globals()[_RENAMED[name]]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
