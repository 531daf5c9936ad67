"""The roles and pipes of a RowKernel, for ``tkq.viz``. No kernel's code depends on this module; a test compares it with
the semaphores that a compiled kernel initialises."""
from ...rows.persistent.shape import DEPTH, WARPGROUP
from ..pipeline import Pipe, Pipeline, Role


def describe(kernel) -> Pipeline:
    """Of an instance of a subclass of ``RowKernel``.

    Raises:
        NotImplementedError: its plan has no ring: all warps do the same, and there is no pipe.
    """
    spec, p = kernel.spec, kernel.plan
    if p.direct:
        raise NotImplementedError(f"pipeline: {type(kernel).__name__}'s rows go from global memory to registers: "
                                  "without a producer there are no roles and no pipe")
    few, many = p.registers
    exchanges = len(kernel.active) if p.width > 1 else 0
    first = WARPGROUP // 32
    names = ", ".join(s.name for s in spec.loads)
    others, notes = [], []
    if exchanges:
        arrivals = 1 if p.cluster > 1 else p.warps_per_row
        others.append((arrivals, exchanges * DEPTH * p.groups))
        whose = "the row's first warp, and the bytes that all warps send" if p.cluster > 1 else "each warp of the row"
        notes.append(f"Exchanges: {exchanges}, {DEPTH} slots for each row of a tile; arrivals: {arrivals}, {whose}.")
    if spec.columns:
        others += [(p.warps, 1), (1, 1)]
        notes.append(f"Column sums: {p.warps} warps have flushed theirs; the producer has the total of all blocks.")
    bytes_ = sum(s.width for s in spec.loads) // 8 * p.groups * p.cols
    return Pipeline(
        title=f"{type(kernel).__name__}: tiles of {p.groups} x {p.cols}, N = {spec.N}"
              + f", clusters of {p.cluster}" * (p.cluster > 1),
        producer=Role("producer", "warp 0", few, (
            "wait until a stage is empty -> bulk copies of the next tile | ..",
            *["wait until all have flushed -> barrier of the grid -> total"] * bool(spec.columns))),
        consumer=Role("consumers", f"warps {first} to {first + p.warps - 1}", many, (
            "tile t: wait until it is full -> partial, down -> publish the row's element",
            f"tile t - {exchanges}: collect -> row -> write, release the stage") if exchanges else (
            "each tile: wait until it is full -> partial, down, row -> write, release the stage",)),
        pipes=(Pipe("tile", f"{p.groups} x {p.cols} of {names}", p.stages, bytes_, p.warps,
                    "one of each computing warp"),),
        notes=tuple(notes), others=tuple(others))
