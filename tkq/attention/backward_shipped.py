"""The kernels of attention's backward that tkq itself can choose: those of ``backward_plan.shipped``, and what models
ask for together. Not in that file, on which every kernel depends."""
import itertools

from tkq.attention import backward_plan
from tkq.attention.backward_plan import plan
from tkq.attention.backward_spec import BackwardSpec, width
from tkq.attention.plan import LENGTHS
from tkq.attention.shipped import MODELS
from tkq.runtime.recipe import Recipe, Shipped


def shipped():
    """Names are unique: flash_attn_backward, dtype, width, choices, length."""
    out = {kernel.recipe: kernel for kernel in backward_plan.shipped()}
    for spec, length, grouped in (*of_models(), *_choices()):
        recipe = Recipe("tkq.attention.backward:build", (spec, plan(spec, length, grouped)))
        out.setdefault(recipe, Shipped(_name(spec, length, grouped), recipe, backward_plan._expectation(*recipe.args)))
    return list(out.values())


def of_models():
    """(spec, length, grouped), as training asks for it."""
    for model, varlen, length, grouped in itertools.product(MODELS.values(), (False, True), LENGTHS, (False, True)):
        for left in {False, model.left is not None}:
            yield BackwardSpec("bf16", width(*model.dims), left, True, model.softcap, varlen=varlen), length, grouped


def _choices():
    """Beside those of dense sequences, and of varlen by itself."""
    varlen = {"varlen": True, "right": True}
    for dim in (64, 128):
        for options in (dict(softcap=True), dict(softcap=True, left=True), dict(dlse=True),
                        dict(used_q=True, used_k=True), dict(deterministic=True)):
            yield BackwardSpec("bf16", dim, **varlen, **options), "medium", False
    yield BackwardSpec("bf16", 128, left=True, varlen=True), "medium", False
    yield BackwardSpec("bf16", 256, left=True, right=True, deterministic=True), "medium", False


def _name(spec, length, grouped):
    flags = "left", "right", "softcap", "dlse", "deterministic", "varlen", "used_q", "used_k"
    flags = [flag for flag in flags if getattr(spec, flag)] + ["grouped"] * grouped
    return "_".join(("flash_attn_backward", spec.dtype, f"d{spec.width}", "with", *flags, length))
