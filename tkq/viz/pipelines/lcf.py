"""The roles of any kernel on ``tkq.tile.LCF``: what its ``run`` makes of the class's attributes."""
from ...tile.block import register_split
from ..pipeline import Pipe, Pipeline, Role


def describe(kernel) -> Pipeline:
    """Of an instance of a subclass of ``LCF``."""
    inputs = {name: x if isinstance(x, tuple) else (x, 1) for name, x in kernel.inputs.items()}
    n, (few, many) = kernel.consumers, register_split(kernel.consumers, *kernel.registers)
    consumers = "consumers" if n > 1 else "consumer"
    behind = f"i - {kernel.lag}" if kernel.lag else "i"
    stage = Pipe(
        name="+".join(inputs), stages=kernel.stages,
        holds=", ".join(f"{name}: {f'{count} of ' * (count > 1)}{tile}" for name, (tile, count) in inputs.items()),
        bytes=sum(tile.bytes * count for tile, count in inputs.values()),
        empty=4 * n, empty_by=f"one of each warp of {n} {consumers}")
    return Pipeline(
        title=f"{type(kernel).__name__}: {kernel.stages} stages, {n} {consumers}",
        producer=Role("producer", "warp 0", few, (
            "each task: for each i: acquire stage i, load; then ask for the next task",)),
        consumer=Role(consumers, f"warps 4 to {4 * n + 3}, {n} warpgroup{'s' * (n > 1)}", many, (
            f"each task: start; for each i: wait for stage i, compute, release stage {behind}; finish",)),
        pipes=(stage,),
        notes=("Where tasks are fetched (schedule dynamic), a mailbox of 2 slots brings the next one's number.",))
