"""What `quant_kept` is compiled for, apart from the plan that chooses: which is chosen makes no kernel anew."""
from ..rows.plan import RowShape
from .kept_plan import SUMS
from .spec import OUT_WIDTH, WIDTH, NormSpec

SQUARES, AMAX = 1, 1  # what is exchanged of an rmsnorm's row; of the scale of a row


def shape(spec: NormSpec) -> RowShape:
    vectors = tuple(WIDTH[d] for d in (spec.weight, spec.bias) if d)
    statistics = SQUARES if spec.kind == "rmsnorm" else SUMS
    return RowShape(spec.N, (spec.width,), (OUT_WIDTH[spec.out],), vectors,
                    sums=(statistics, *([AMAX] if spec.scale == "row" else ())), vector=spec.vector)
