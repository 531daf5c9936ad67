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
    state, alone = f"one of each warp of {n} warpgroup{'s' * (n > 1)} of the state", kernel.factors_alone
    scores = [f"P of a chunk, {c.heads} of {kernel.p_tile}"] * spec.scored + ["gates' factors"] * spec.gated
    first = 4 * (1 + c.scores)  # warp of the state
    return Pipeline(
        title=f"LinearAttention: {spec.dtype}, K {spec.head_dim}, V {spec.value_dim}, gates {spec.gate}"
              + ", the delta rule" * bool(spec.delta) + ", reversed" * spec.reverse,
        producer=Role("producer", "warp 0", c.registers[0], ("each chunk: acquire a stage, load its tokens",)),
        between=(*_factors(kernel), Role("scores", f"warps 4 to {first - 1}, {_warpgroups(c.scores)}", c.registers[1], (
            _first(kernel), *(("(I + L) X = I by substitution and merges: the inverse",) * bool(spec.delta)))),),
        consumer=Role("state", f"warps {first} to {first + 4 * n - 1}, {_warpgroups(n)}", c.registers[2], _steps(spec)),
        pipes=(Pipe("tokens", holds, c.stages, keys * kernel.qk_tile.bytes + n * parts * kernel.v_tile.bytes,
                    4 * (not alone) + 4 * n, "one of each warp of its scores, " * (not alone) + state,
                    target="state" if alone else "scores, state"),
               Pipe("scores", ", ".join(scores) or "nothing", c.score_stages, 0, 4 * n, state,
                    c.heads if alone else 4, "a warp for each head" if alone else "the warps that make them",
                    source="scores")),
        notes=(SPLIT.format(columns=64 * n // c.heads),))


def _warpgroups(count) -> str:
    return f"{count} warpgroup{'s' * (count > 1)}"


def _factors(kernel) -> tuple:
    """The role of warps beside the producer, where there are such."""
    count = kernel.factors.count
    return (Role("factors", f"warps 1 to {count}, one for each head", kernel.config.registers[0], (
        "each chunk: an empty stage of scores, what gates make of it; a barrier with the scores",)),) * bool(count)


def _first(kernel) -> str:
    """What the scores' warpgroups do of each chunk."""
    spec, c = kernel.spec, kernel.config
    if kernel.factors_alone:
        return f"a warp: what gates make of each {'4th' if c.heads == 1 else '2nd'} chunk"
    products = " and ".join(("Q K'",) * spec.scored + ("K K'",) * bool(spec.delta)) or "no products"
    own = "each of its chunks, every other one" if c.scores > 1 else "each chunk"
    return f"{own}: {products}" + ", times gates" * spec.gated + ", masked" * spec.queried + ": P" * spec.scored


def _steps(spec) -> tuple:
    """What a warpgroup of the state does of each chunk."""
    reads = ("O' = S' Q'",) * spec.queried + ("U' = V' - S' K', times the inverse",) * bool(spec.delta)
    values = "U'" if spec.delta else "V'"
    own = (f"O' += {values} P'",) * spec.scored
    return ("each chunk: " + ", ".join((*reads, *own, f"S' = decayed S' + {values} K")),
            *(("O' through shared memory to global memory",) * spec.writes),
            *(("behind the last chunk: S to global memory",) * (spec.final is not None)))
