"""The kernels of attention's backward that tkq itself can choose: those of ``backward_plan.shipped``, and what models
ask for together. Not in that file, on which every kernel depends."""
import itertools

from tkq.attention.backward import plan as backward_plan
from tkq.attention.backward.plan import PACKED_LENGTHS, plan, recipe
from tkq.attention.backward.spec import BackwardSpec, width
from tkq.attention.forward.catalog import MODELS
from tkq.attention.forward.plan import LENGTHS
from tkq.runtime.compile.recipe import Shipped

GROUPS = {1: "", 2: "pairs", 4: "grouped"}  # query heads that share a K/V head, and what names say of them


def shipped():
    """Names are unique: flash_attn_backward, dtype, width, choices, length."""
    out = {kernel.recipe: kernel for kernel in backward_plan.shipped()}
    for spec, length, group in (*of_models(), *_choices()):
        kernel = recipe(spec, plan(spec, length, group))
        out.setdefault(kernel, Shipped(_name(spec, length, group), kernel, backward_plan._expectation(*kernel.args)))
    return list(out.values())


def of_models():
    """(spec, length, group), as training asks for it."""
    for model, varlen, group in itertools.product(MODELS.values(), (False, True), GROUPS):
        for length, left in itertools.product(PACKED_LENGTHS if varlen else LENGTHS, {False, model.left is not None}):
            yield BackwardSpec("bf16", width(*model.dims), left, True, model.softcap, varlen=varlen), length, group


def _choices():
    """Beside those of dense sequences, and of varlen by itself."""
    varlen = {"varlen": True, "right": True}
    for dim in (64, 128):
        for options in (dict(softcap=True), dict(softcap=True, left=True), dict(dlse=True),
                        dict(seqused_q=True, seqused_k=True), dict(deterministic=True)):
            yield BackwardSpec("bf16", dim, **varlen, **options), "medium", 1
    yield BackwardSpec("bf16", 128, left=True, varlen=True), "medium", 1
    yield BackwardSpec("bf16", 256, left=True, right=True, deterministic=True), "medium", 1
    yield from ((BackwardSpec("bf16", 256, deterministic=True, **varlen), "medium", group) for group in (1, 4))


def _name(spec, length, group):
    flags = "left", "right", "softcap", "dlse", "deterministic", "varlen", "seqused_q", "seqused_k"
    flags = [flag for flag in flags if getattr(spec, flag)] + [GROUPS[group]] * (group > 1)
    return "_".join(("flash_attn_backward", spec.dtype, f"d{spec.width}", "with", *flags, length))
