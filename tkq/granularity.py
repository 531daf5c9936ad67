"""Which elements of a matrix share a float8 scale: the names, in one table. Pure Python."""
from typing import NamedTuple

GROUP = 128  # the edge of a block


class Granularity(NamedTuple):
    """name: what functions, specs and ops have. scaling_type: the member of torch.nn.functional.ScalingType. rows,
    columns: of a block that shares a scale, 0 for all of them; the scales of (M, K) are (ceil(M / rows),
    ceil(K / columns)), and (1,) for "tensor"."""

    name: str
    scaling_type: str
    rows: int
    columns: int


TABLE = (Granularity("tensor", "TensorWise", 0, 0), Granularity("row", "RowWise", 1, 0),
         Granularity("1x128", "BlockWise1x128", 1, GROUP), Granularity("128x128", "BlockWise128x128", GROUP, GROUP))
NAMES = tuple(g.name for g in TABLE)
BLOCKS = {g.name: (g.rows, g.columns) for g in TABLE}
SCALING_TYPES = {g.name: g.scaling_type for g in TABLE}
# of a product's operands, (a's, b's), by the name that kernels and tests have for the pair; b's are of its transpose
PRODUCTS = {"tensor": ("tensor", "tensor"), "row": ("row", "row"), "1x128_128x128": ("1x128", "128x128"),
            "1x128_1x128": ("1x128", "1x128")}
_NAMES_OF_PAIRS = {pair: name for name, pair in PRODUCTS.items()}


def pair_name(spec) -> str:
    """The name in ``PRODUCTS`` of a product's scale_a and scale_b; "none" where it has no scales."""
    return _NAMES_OF_PAIRS.get((spec.scale_a, spec.scale_b), "none")


def scales_of(pair: str) -> dict[str, str]:
    """The fields of a product's spec, by the name in ``PRODUCTS``."""
    return dict(zip(("scale_a", "scale_b"), PRODUCTS[pair], strict=True))


def members(names) -> str:
    """Torch's members of these names, as messages list them."""
    return f"{', '.join(SCALING_TYPES[name] for name in names)} of torch's ScalingType"
