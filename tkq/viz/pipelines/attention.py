"""The roles and pipes of the forward kernel, for ``tkq.viz``. No kernel's code depends on this module; a test compares
it with the semaphores that compiled kernels initialise."""
from ...tile.block import register_split
from ..pipeline import Pipe, Pipeline, Role


def describe(kernel) -> Pipeline:
    """Of an ``AttentionForward``."""
    spec, c, tiles = kernel.spec, kernel.config, kernel.tiles
    few, many = register_split(c.consumers, *c.registers)
    shared = f" in each of {c.cluster} blocks" * (c.cluster > 1)
    every = f"one of each warp of {c.consumers} consumers{shared}"
    of_kv = dict(stages=c.stages, empty=4 * c.consumers * c.cluster, empty_by=every)
    last = "after O has left through Q's tile" if c.o_reuses_q_smem else "after the task's last S"
    dealt = c.cluster > 1 and c.schedule == "dynamic"
    return Pipeline(
        title=f"AttentionForward: {spec.dtype}, head_dim {spec.head_dim}{', causal' * spec.causal}, {c.schedule} tasks "
              f"of {c.rows} rows",
        producer=Role("producer", "warp 0", few, (
            "each task: K(n-1) | task and Q | K(n-2) V(n-1) | K(n-3) V(n-2) | .. | the next task | V(0)",)),
        consumer=Role("consumers", f"warps 4 to {4 * c.consumers + 3}, {c.consumers} warpgroups of 64 rows", many, (
            "S = Q K(n-1)', softmax | S' = Q K(i-1)' and O += P V(i), softmax of S' under P V | .. | O += P V(0) | O",
            *["the next task's first S and softmax run under this one's last P V"] * c.overlap_tasks,
            *["they take turns to issue their products: one's softmax runs under another's"] * c.ping_pong)),
        pipes=(
            Pipe("Q", f"{tiles.q} and the task", c.q_stages, tiles.q.bytes, 4,
                 f"one of each of the consumer's own warps, {last}", copies=c.consumers),
            Pipe("K", str(tiles.k), bytes=tiles.k.bytes, **of_kv),
            Pipe("V", str(tiles.v), bytes=tiles.v.bytes, **of_kv)),
        notes=("Each of the two blocks loads half of a K or V tile, for both.",) * (c.cluster > 1)
        + ("The first block's producer sends the next task to the other's.",) * dealt,
        others=((1, 2),) * dealt)
