"""The kernels of Based that tkq itself can choose, and what their machine code must show."""
from dataclasses import replace

from tkq.linear_attention.based.gradients import prepare_recipe
from tkq.linear_attention.based.gradients import recipe as gradient_recipe
from tkq.linear_attention.based.launch import recipe
from tkq.linear_attention.based.plan import gradient_plan, plan
from tkq.linear_attention.based.spec import BasedSpec, GradientSpec
from tkq.runtime.compile.expectation import Expectation
from tkq.runtime.compile.recipe import Shipped


def shipped() -> list:
    """Forward and backward of bf16 and the V that models have, whole and in segments."""
    end, spec = "-bf16-v64", BasedSpec("bf16", 64)
    forwards = {f"based{end}": spec, f"based{end}-states": replace(spec, part="states"),
                f"based{end}-outputs": replace(spec, part="outputs"), f"based{end}-no_norm": replace(spec, norm=False)}
    back = BasedSpec("bf16", 64, norm=False, reverse=True)
    forwards |= {f"based_dv{end}": back, f"based_dv{end}-states": replace(back, part="states"),
                 f"based_dv{end}-outputs": replace(back, part="outputs")}
    of_q = GradientSpec("bf16", 64)
    gradients = {f"based_dq{end}": of_q, f"based_dk{end}": replace(of_q, reverse=True),
                 f"based_dq{end}-no_norm": replace(of_q, norm=False),
                 f"based_dk{end}-no_norm": replace(of_q, norm=False, reverse=True)}
    return [*(Shipped(name, recipe(x), expectation(x)) for name, x in forwards.items()),
            *(Shipped(name, gradient_recipe(x), gradient_expectation(x)) for name, x in gradients.items()),
            Shipped(f"based_prepare{end}", prepare_recipe(of_q), Expectation(instructions=("LDG.E.128", "STG.E.128")))]


def expectation(spec: BasedSpec) -> Expectation:
    """The state's two products, 10 steps of features and two times 4 of tokens; 4 for P; one for the scores; 6 for the
    moments and q's product with them."""
    few, some, many = plan(spec).registers
    if spec.part == "states":
        return Expectation(tensor=8 + 4 * spec.norm, instructions=("UTMALDG", "USETMAXREG", "HMUL2"),
                           roles=((few, 1), (some, 1), (many, 1)))
    return Expectation(tensor=23 + 6 * spec.norm, instructions=("UTMALDG", "UTMASTG", "USETMAXREG", "HMUL2"),
                       roles=((few, 1), (some, 1), (many, 1)))


def gradient_expectation(spec: GradientSpec) -> Expectation:
    """x y' and a b', 5; w y, 4; those of the state, 8 and 8; those of the moments, 4 and 8."""
    return Expectation(tensor=25 + 12 * spec.norm, instructions=("UTMALDG", "USETMAXREG", "HMUL2"),
                       roles=tuple((n, 1) for n in gradient_plan(spec).registers))
