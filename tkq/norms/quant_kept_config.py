"""What `quant_kept` is compiled for, apart from the plan that chooses: which is chosen makes no kernel anew."""
from ..rows.plan import RowShape
from .kept_plan import SUMS
from .spec import OUT_WIDTH, WIDTH, NormSpec

AMAX = 1  # what is exchanged of the scale of a row


def shape(spec: NormSpec) -> RowShape:
    vectors = tuple(WIDTH[d] for d in (spec.weight, spec.bias) if d)
    return RowShape(spec.N, (spec.width,), (OUT_WIDTH[spec.out],), vectors,
                    sums=(SUMS, *([AMAX] if spec.scale == "row" else ())), vector=spec.vector)
