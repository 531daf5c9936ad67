"""What `fp8_persistent` is compiled for, apart from the plan that chooses: which is chosen makes no kernel anew."""
from ..dtypes import WIDTH
from ..rows.persistent.plan import RowShape
from .persistent_plan import SUMS
from .spec import OUT_WIDTH, NormSpec

SQUARES, AMAX = 1, 1  # what is exchanged of an rmsnorm's row; of the scale of a row


def shape(spec: NormSpec) -> RowShape:
    vectors = tuple(WIDTH[d] for d in (spec.weight, spec.bias) if d)
    statistics = SQUARES if spec.kind == "rmsnorm" else SUMS
    loads = tuple(WIDTH[d] for d in (spec.x, spec.residual) if d)
    stores = tuple(OUT_WIDTH[d] for d in (spec.out, spec.total) if d)
    return RowShape(spec.N, loads, stores, vectors,
                    sums=(statistics, *([AMAX] if spec.scale == "row" else ())), vector=spec.vector)
