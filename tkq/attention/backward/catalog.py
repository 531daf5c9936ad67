"""The kernels of attention's backward that tkq itself can choose: every configuration of the plan, and what models ask
for together."""
import itertools

from tkq.attention.backward.plan import PACKED_LENGTHS, plan, recipe
from tkq.attention.backward.spec import WIDTHS, BackwardSpec
from tkq.attention.backward.spec import width as width_of
from tkq.attention.forward.catalog import MODELS
from tkq.attention.forward.plan import LENGTHS
from tkq.runtime.compile.expectation import Expectation
from tkq.runtime.compile.recipe import Shipped

GROUPS = {1: "", 2: "pairs", 4: "grouped"}  # query heads that share a K/V head, and what names say of them


def shipped():
    """Names are unique: flash_attn_backward, dtype, width, choices, length."""
    out = _of_plans()
    for spec, length, group in (*of_models(), *_choices()):
        kernel = recipe(spec, plan(spec, length, group))
        out.setdefault(kernel, Shipped(_name(spec, length, group), kernel, _expectation(*kernel.args)))
    return list(out.values())


def _of_plans():
    """Every configuration that ``plan`` can choose, for the kinds of call that differ most: {recipe: Shipped}."""
    mask, same = {"right": True}, {"deterministic": True}
    kinds = {"": {}, "causal": mask, "grouped": {}, "grouped_causal": mask, "window": {"left": True, **mask},
             "causal_softcap": {"softcap": True, **mask}, "causal_dlse": {"dlse": True, **mask},
             "causal_no_dq": {"dq": False, **mask}, "deterministic": same, "causal_deterministic": {**mask, **same},
             "grouped_deterministic": same, "grouped_causal_deterministic": {**mask, **same},
             "window_softcap_deterministic": {"left": True, "softcap": True, **mask, **same},
             "varlen": {"varlen": True}, "varlen_causal": {"varlen": True, **mask},
             "varlen_used_window_deterministic": {"varlen": True, "seqused_q": True, "seqused_k": True, "left": True,
                                                  **mask, **same}}
    out = {}
    for (kind, options), dtype, width, length in itertools.product(
            kinds.items(), ("bf16", "fp16"), WIDTHS, PACKED_LENGTHS):
        spec = BackwardSpec(dtype, width, **options)
        if length == "brief" and not spec.varlen:
            continue
        config = plan(spec, length, 4 if kind.startswith("grouped") else 1)
        kernel = recipe(spec, config)
        name = "_".join(("flash_attn_backward", dtype, f"d{width}", *filter(None, [kind]), length))
        usual = dtype == "bf16" and (width, length) not in ((64, "short"), (128, "short"))
        quick = usual and (kind in ("", "causal") or (kind == "varlen_causal" and width == 128))
        out.setdefault(kernel, Shipped(name, kernel, _expectation(spec, config), quick=quick))
    return out


def of_models():
    """(spec, length, group), as training asks for it."""
    for model, varlen, group in itertools.product(MODELS.values(), (False, True), GROUPS):
        for length, left in itertools.product(PACKED_LENGTHS if varlen else LENGTHS, {False, model.left is not None}):
            yield BackwardSpec("bf16", width_of(*model.dims), left, True, model.softcap, varlen=varlen), length, group


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


def _expectation(spec, config):
    """What the machine code of a configuration must show."""
    dq = ("REDG" if config.dq_from_registers else "UBLKRED",) if config.adds_dq(spec) else ()
    # of tiles of 128 queries, two registers more than there are: a few values wait on the stack, once in a tile
    short = spec.width == 64 and (config.serial or config.fuse_preprocess)
    return Expectation(
        tensor=24, local_memory=8 if short else 0,
        instructions=("UTMALDG", "STG.E.128" if config.store_from_registers else "UTMASTG", "UBLKCP", "USETMAXREG",
                      *["STSM"] * (config.adds_dq(spec) or not config.store_from_registers), *dq),
        roles=config.roles,
        others=(("DqKernel", Expectation(tensor=24, local_memory=8 * (spec.varlen and spec.width == 256),
                                         instructions=("UTMALDG", "UTMASTG", "USETMAXREG", "STSM"))),
                *((name, Expectation(instructions=("LDG.E.128",)))
                  for name in ("BackwardPreprocess", "PreprocessFirstTiles")),
                ("BackwardPostprocess", Expectation(instructions=("LDG.E.128", "STSM", "UTMASTG")))))
