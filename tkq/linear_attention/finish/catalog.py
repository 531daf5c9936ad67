"""The kernels behind the engine's launches that tkq itself can choose, and what their machine code must show."""
import itertools

from tkq.linear_attention.finish.launch import recipe
from tkq.linear_attention.finish.spec import HeadSumsSpec, RowDotsSpec, lanes
from tkq.runtime.compile.expectation import Expectation
from tkq.runtime.compile.recipe import Shipped

SIZES = (64, 128)
SUMS = Expectation(instructions=("LDG.E.128", "STG.E.128"))
DOTS = Expectation(instructions=("LDG.E.128",))


def shipped() -> list:
    """Of bf16: sums over shared heads of 64 and 128 columns; the delta rule's of the width that models have."""
    return [*_sums(), *_delta_rule()]


def _sums():
    for columns, heads in itertools.product(SIZES, (1, 2, 4, 8)):
        yield Shipped(f"linear_attn_shared_heads-bf16-k{columns}-{heads}",
                      recipe(HeadSumsSpec("bf16", columns, "bf16", heads)), SUMS)
    for columns, heads in ((64, 1), (64, 2), (64, 4), (64, 8), (128, 1), (128, 2)):  # 64: also of Hedgehog's maps
        yield Shipped(f"linear_attn_shared_heads-bf16-k{columns}-column-{heads}",
                      recipe(HeadSumsSpec("bf16", columns, "fp32", heads)), SUMS)


def _delta_rule():
    for beta in ("fp32", "bf16"):
        yield Shipped(f"gated_delta_rule_dbeta-bf16-v128-beta_{beta}",
                      recipe(RowDotsSpec("bf16", 128, beta, lanes(128))), DOTS)
