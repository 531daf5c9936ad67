"""The roles and pipes of the 16-bit GEMM, for ``tkq.viz``. No kernel's code depends on this module; a test compares it
with the semaphores that compiled kernels initialise."""
from ..tile.block import register_split
from ..viz.roles import Pipe, Pipeline, Role


def describe(kernel) -> Pipeline:
    """Of a ``DenseGemm``."""
    spec, c = kernel.spec, kernel.config
    few, many = register_split(c.consumers)
    n, shared = c.consumers, f" in each of {c.cluster} blocks" * (c.cluster > 1)
    several = "s" * (n > 1)
    written = "its epilogue; rounded, it waits in registers and is stored under the next tile's first steps" if c.hold \
        else "its epilogue, and stored panel by panel"
    return Pipeline(
        title=f"DenseGemm: {spec.dtype}, tiles of {c.m} x {c.n}" + f", clusters of {c.cluster}" * (c.cluster > 1),
        producer=Role("producer", "warp 0", few, ("each tile: for each step of K: acquire a stage, load A and B",)),
        consumer=Role(f"consumer{several}", f"warps 4 to {4 * n + 3}, {n} warpgroup{several} of 64 rows", many, (
            "each tile: for each step of K: wait for its stage, wgmma, release the stage before",
            f"then {written}")),
        pipes=(Pipe("AB", f"A: {kernel.a_tile}, B: {kernel.b_tile}", c.stages,
                    kernel.a_tile.bytes + kernel.b_tile.bytes, 4 * n * c.cluster,
                    f"one of each warp of {n} consumer{several}{shared}"),),
        notes=("The blocks of a cluster have tiles one above the other: each loads its own A, and its part of B for "
               "all.",) * (c.cluster > 1))
