"""The roles and pipes of the GEMMs, for ``tkq.viz``. No kernel's code depends on this module; a test compares it with
the semaphores that compiled kernels initialise."""
from ...tile.block import register_split
from ..pipeline import Pipe, Pipeline, Role

SHARED = "The blocks of a cluster have tiles one above the other: each loads its own A, and its part of B for all."
ACROSS = "The blocks of a cluster have tiles side by side: each loads its own B, and its part of A for all."
WAVE_SYNC = "once a wave, behind 1 / {wave_sync} of its own: wait until all blocks have begun theirs"
COUNTED = "Waves are counted in global memory, without a semaphore: a block adds 1 and waits a while at most."


def describe(kernel) -> Pipeline:
    """Of a ``DenseGemm``."""
    spec, c = kernel.spec, kernel.config
    written = "its epilogue, and stored panel by panel"
    if c.hold_in_registers:
        written = "its epilogue; rounded, it waits in registers and is stored under the next tile's first steps"
    return _of_one_pipe(
        kernel, register_split(c.consumers), copies=0, notes=(SHARED,) * (c.cluster > 1),
        title=f"{type(kernel).__name__}: {spec.dtype}, tiles of {c.m} x {c.n}", written=written)


def describe_fp8(kernel) -> Pipeline:
    """Of an ``Fp8Gemm`` or a ``GroupedGemm``."""
    spec, c = kernel.spec, kernel.config
    few_many = register_split(c.consumers, *kernel.block.registers)
    scales = "no scales" if spec.scale_b == "none" else f"scales {spec.scale_a} of a, {spec.scale_b} of b"
    written = "its epilogue, and stored panel by panel"
    if c.overlap_epilogue and c.promotion_unroll:
        written = f"its epilogue; its last {c.overlap_epilogue} panels wait in the sums, for the next tile's first step"
    elif c.overlap_epilogue:
        written = "its epilogue; rounded, it waits in registers and is stored under the next tile's first steps"
    return _of_one_pipe(
        kernel, few_many, copies=32 if spec.per_step else 0,
        notes=(ACROSS if c.cluster_along_n else SHARED,) * (c.cluster > 1),
        title=f"{type(kernel).__name__}: {scales}, tiles of {c.m} x {c.n}", written=written)


def describe_with_counter(kernel) -> Pipeline:
    """Of a ``WithCounter``: its Fp8Gemm's."""
    return describe_fp8(kernel.gemm)


def _of_one_pipe(kernel, few_many, copies, title, written, notes) -> Pipeline:
    """copies: threads of the producer that bring a stage's scales by copies of their own."""
    c = kernel.config
    wave_sync = getattr(c, "wave_sync", 0) > 0
    a, b = kernel.tiles.a, kernel.tiles.b
    n, several = c.consumers, "s" * (c.consumers > 1)
    shared = f" in each of {c.cluster} blocks" * (c.cluster > 1)
    return Pipeline(
        title=title + f", clusters of {c.cluster}" * (c.cluster > 1),
        producer=Role("producer", "warp 0", few_many[0], (
            "each tile: for each step of K: acquire a stage, load A and B" + ", and their scales" * (copies > 0),
            *((WAVE_SYNC.format(wave_sync=c.wave_sync),) if wave_sync else ()))),
        consumer=Role(f"consumer{several}", f"warps 4 to {4 * n + 3}, {n} warpgroup{several}", few_many[1], (
            "each tile: for each step of K: wait for its stage, wgmma, release the stage before",
            f"then {written}")),
        pipes=(Pipe("AB", f"A: {a}, B: {b}", c.stages,
                    a.bytes + b.bytes, 4 * n * c.cluster,
                    f"one of each warp of {n} consumer{several}{shared}", full=1 + copies,
                    full_by="the producer and its lanes' copies" if copies else "the producer"),),
        notes=(*notes, COUNTED) if wave_sync else notes)
