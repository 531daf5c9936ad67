"""What `quant_kept` is compiled for, apart from the plan that chooses: which is chosen makes no kernel anew."""
from dataclasses import dataclass

from ..rows.plan import RowPlan, RowShape
from .spec import OUT_WIDTH, WIDTH, NormSpec

SUMS, PAIR, AMAX = 3, 2, 1  # of the statistics: count, mean, squares, or without a count; of the scale of a row


@dataclass(frozen=True)
class KeptPlan(RowPlan):
    """pairs: every warp has as many elements of a row, so that (mean, squares) of each say all: see `quant_kept.Pairs`.
    Otherwise its number goes with them."""

    pairs: bool = False


def shape(spec: NormSpec, pairs: bool = False) -> RowShape:
    vectors = tuple(WIDTH[d] for d in (spec.weight, spec.bias) if d)
    return RowShape(spec.N, (spec.width,), (OUT_WIDTH[spec.out],), vectors,
                    sums=(PAIR if pairs else SUMS, *([AMAX] if spec.scale == "row" else ())), vector=spec.vector)
