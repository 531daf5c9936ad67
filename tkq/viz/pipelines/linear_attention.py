"""The roles and pipes of linear attention's engine, for ``tkq.viz``. No kernel's code depends on this module; a test
compares it with the semaphores that compiled kernels initialise."""
from ..pipeline import Pipe, Pipeline, Role

SPLIT = "Each warpgroup of the state has 64 columns of V: a block {columns}, the blocks of a head the others."


def describe(kernel) -> Pipeline:
    """Of a ``LinearAttention``."""
    spec, c, second = kernel.spec, kernel.config, kernel.second
    n, parts = c.groups, 1 + spec.has_x + second.pair
    keys = 1 + spec.queried + second.there
    holds = f"{keys} of {kernel.qk_tile}, {n * parts} of {kernel.v_tile}"
    state = f"one of each warp of {n} warpgroup{'s' * (n > 1)} of the state"
    scores = f"P of a chunk, {c.heads} of {kernel.p_tile}" + ", what decays" * (spec.gate != "none")
    return Pipeline(
        title=f"LinearAttention: {spec.dtype}, K {spec.head_dim}, V {spec.value_dim}, gates {spec.gate}"
              + ", the delta rule" * bool(spec.delta) + ", reversed" * spec.reverse,
        producer=Role("producer", "warp 0", c.registers[0], ("each chunk: acquire a stage, load its tokens",)),
        between=(Role("scores", "warps 4 to 7, a warpgroup", c.registers[1], (
            _first(spec), *(("(1 + A) X = 1 by substitution and merges: the inverse",) * bool(spec.delta)))),),
        consumer=Role("state", f"warps 8 to {4 * n + 7}, {n} warpgroup{'s' * (n > 1)}", c.registers[2], _steps(spec)),
        pipes=(Pipe("tokens", holds, c.stages, keys * kernel.qk_tile.bytes + n * parts * kernel.v_tile.bytes, 4 + 4 * n,
                    f"one of each warp of the scores, {state}", target="scores, state"),
               Pipe("scores", scores, 2, 0, 4 * n, state, 4, "the warps of the scores", source="scores")),
        notes=(SPLIT.format(columns=64 * n // c.heads),))


def _first(spec) -> str:
    """What the scores' warpgroup does of each chunk."""
    products = " and ".join(("Q K'",) * spec.scored + ("K K'",) * bool(spec.delta))
    return f"each chunk: {products}, times gates, masked" + ": P" * spec.scored


def _steps(spec) -> tuple:
    """What a warpgroup of the state does of each chunk."""
    reads = ("O' = S' Q'",) * spec.queried + ("U' = V' - S' K', times the inverse",) * bool(spec.delta)
    values = "U'" if spec.delta else "V'"
    own = (f"O' += {values} P'",) * spec.scored
    return ("each chunk: " + ", ".join((*reads, *own, f"S' = decayed S' + {values} K")),
            *(("O' through shared memory to global memory",) * spec.writes),
            *(("behind the last chunk: S to global memory",) * (spec.final is not None)))
