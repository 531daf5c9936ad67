"""The attention kernels that tkq itself can choose, and what their machine code must show.

Head dims, masks, softcap, sinks, varlen, packing and dtypes combine freely: their kernels are compiled when they are
first asked for. Listed are all plans of the plain kernel, each further choice beside the others, and what models ask
for together."""
import itertools
from typing import NamedTuple, Optional

from tkq.attention.forward.plan import LENGTHS, plan, recipe
from tkq.attention.forward.spec import WIDTHS, AttentionSpec
from tkq.runtime.compile.expectation import Expectation
from tkq.runtime.compile.recipe import Shipped

QUICK = ((64, True, "medium"), (128, False, "short"), (128, False, "long"))


class Model(NamedTuple):
    """What the layers of a model have beside a causal mask. left: some have a limit on the left too, "near" or
    "long_window" (see ``spec.LONG_WINDOW``)."""

    dims: tuple
    left: Optional[str] = None
    softcap: bool = False
    sinks: Optional[str] = None


MODELS = {
    "llama": Model((128, 128)),
    "mistral": Model((128, 128), left="long_window"),
    "gemma 2": Model((256, 256), left="long_window", softcap=True),
    "gpt-oss": Model((64, 64), left="near", sinks="bf16"),
    "deepseek": Model((192, 128)),
    "phi-3": Model((96, 96), left="long_window"),
}
DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))


def shipped():
    """Names are unique: flash_attn, dtype, head dims, choices, length."""
    out = {}
    for spec, length, quick in (*_plain(), *_choices(), *_masks(), *of_models()):
        config = plan(spec, length)
        kernel = recipe(spec, config)
        out.setdefault(kernel, Shipped(_name(spec, length), kernel, _expectation(spec, config), quick))
    return list(out.values())


def _plain():
    """Every plan, with each dtype, with and without lse."""
    for dtype, lse in (("bf16", False), ("bf16", True), ("fp16", True)):
        for dims, causal, length in itertools.product(DIMS, (False, True), LENGTHS):
            quick = dtype == "bf16" and not lse and (dims[0], causal, length) in QUICK
            yield AttentionSpec(dtype, dims[0], causal, lse, dims[1]), length, quick


def _choices():
    """Each choice by itself; all of them together; every pair of widths."""
    for mask in ("causal",), ("causal", "left"), ("left",), ("left", "right"), ("right",):
        yield AttentionSpec("bf16", 128, **dict.fromkeys(mask, True)), "medium", mask == ("causal", "left")
    for mask in ("causal",), ("right",), ():
        yield AttentionSpec("bf16", 128, left=True, long_window=True, **dict.fromkeys(mask, True)), "medium", False
    for dim, causal in itertools.product((64, 128, 256), (False, True)):
        yield AttentionSpec("bf16", dim, causal, varlen=True), "medium", dim == 128 and causal
    yield AttentionSpec("bf16", 128, varlen=True), "long", False
    yield AttentionSpec("bf16", 128, softcap=True), "medium", False
    yield AttentionSpec("bf16", 128, True, sinks="bf16"), "medium", False
    for pack in (2, 8):
        yield AttentionSpec("bf16", 128, True, pack=pack), "short", False
    for dim in WIDTHS:
        yield AttentionSpec("bf16", dim, False, left=True, right=True, softcap=True, sinks="fp32", varlen=True,
                            seqused_q=True, seqused_k=True, pack=4), "medium", dim == 256
    for dims in itertools.product(WIDTHS, WIDTHS):
        yield AttentionSpec("bf16", dims[0], True, head_dim_v=dims[1]), "medium", dims == (192, 128)


def _masks():
    """Softcap and sinks beside masks, dense and of packed sequences."""
    causal, window, both = dict(causal=True), dict(causal=True, left=True), dict(left=True, right=True)
    masks = (64, causal), (64, window), (128, causal), (128, window), (128, both)
    for (dim, mask), varlen, more in itertools.product(masks, (False, True), (
            {}, dict(softcap=True), dict(sinks="fp32"))):
        yield AttentionSpec("bf16", dim, varlen=varlen, **mask, **more), "medium", False


def of_models():
    """As training asks for it."""
    for model, varlen, length in itertools.product(MODELS.values(), (False, True), LENGTHS):
        for left in dict.fromkeys((None, model.left)):  # a set has another order in each process
            spec = AttentionSpec("bf16", model.dims[0], True, True, model.dims[1], left is not None,
                                 softcap=model.softcap, sinks=model.sinks, varlen=varlen,
                                 long_window=left == "long_window")
            yield spec, length, False


def _name(spec, length):
    dims = f"d{spec.head_dim}" if spec.head_dim == spec.head_dim_v else f"d{spec.head_dim}_{spec.head_dim_v}"
    flags = ("causal", "left", "long_window", "right", "softcap", "varlen", "seqused_q", "seqused_k")
    flags = [flag for flag in flags if getattr(spec, flag)]
    more = [f"sinks_{spec.sinks}"] * bool(spec.sinks) + [f"pack{spec.pack}"] * (spec.pack > 1)
    return "_".join(("flash_attn", spec.dtype, dims, *flags, *more, length, *["lse"] * spec.lse))


def _expectation(spec, config):
    """Tensor cores not serialised, TMA in and, but for O from registers, out, registers handed from the producer to the
    consumers."""
    out = () if config.o_from_registers else ("UTMASTG", "STSM")
    tanh = ["MUFU.TANH"] * spec.softcap
    return Expectation(tensor=20, instructions=("UTMALDG", "USETMAXREG", *out, *tanh))
