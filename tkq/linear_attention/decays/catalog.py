"""The kernels of decays for each column that tkq itself can choose, and what their machine code must show."""
from tkq.linear_attention.decays.launch import recipe
from tkq.linear_attention.decays.spec import DecaySpec
from tkq.runtime.compile.expectation import Expectation
from tkq.runtime.compile.recipe import Shipped

WANTED = Expectation(instructions=("LDG.E.64", "LDG.E.128", "MUFU.EX2"))


def shipped() -> list:
    """Of bf16 and the width that models have, with and without a lower bound, and gradients."""
    return [Shipped(f"column_decays{'_gradients' * gradient}-bf16-k128{'-bounded' * bounded}",
                    recipe(DecaySpec("bf16", 128, bounded, gradient)), WANTED)
            for gradient in (False, True) for bounded in (False, True)]
