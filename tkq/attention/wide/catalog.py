"""The kernels of attention with wide heads that tkq itself can choose, and what their machine code must show.

Masks, softcap, sinks, varlen, packing and dtypes combine freely: their kernels are compiled when they are first asked
for. Listed are the plain kernels of every width, and each further choice beside the widest."""
import itertools

from tkq.attention.wide.config import PARTS
from tkq.attention.wide.plan import plan, recipe
from tkq.attention.wide.spec import WIDTHS, WideSpec
from tkq.runtime.compile.expectation import Expectation
from tkq.runtime.compile.recipe import Shipped


def shipped():
    """Names are unique: flash_attn, dtype, head dim, choices."""
    out = {}
    for spec in (*_plain(), *_choices()):
        config = plan(spec)
        out.setdefault(_name(spec), Shipped(_name(spec), recipe(spec, config), _expectation(spec, config),
                                            spec == WideSpec("bf16", 320, False, False)))
    return list(out.values())


def _plain():
    for (dtype, lse), dim, causal in itertools.product((("bf16", False), ("bf16", True), ("fp16", True)), WIDTHS,
                                                       (False, True)):
        yield WideSpec(dtype, dim, causal, lse)


def _choices():
    """Packed sequences; a window, as of models whose layers have one in turns; all choices together."""
    for dim, mask in itertools.product((320, 512), ({}, dict(causal=True), dict(causal=True, left=True))):
        yield WideSpec("bf16", dim, varlen=True, **mask)
    yield WideSpec("bf16", 512, True, left=True, long_window=True)
    yield WideSpec("bf16", 512, True, pack=8)
    yield WideSpec("bf16", 512, left=True, right=True, softcap=True, sinks="fp32", varlen=True, seqused_q=True,
                   seqused_k=True, pack=4)


def _name(spec):
    flags = ("causal", "left", "long_window", "right", "softcap", "varlen", "seqused_q", "seqused_k")
    flags = [flag for flag in flags if getattr(spec, flag)]
    more = [f"sinks_{spec.sinks}"] * bool(spec.sinks) + [f"pack{spec.pack}"] * (spec.pack > 1)
    return "_".join(("flash_attn", spec.dtype, f"d{spec.head_dim}", *flags, *more, *["lse"] * spec.lse))


def _expectation(spec, config):
    """Tensor cores not serialised, TMA in, registers handed between the roles. Of packed sequences with a causal
    mask and lse numbers of the task wait on the stack."""
    few, scores, out = config.registers
    waiting = 16 * (spec.varlen and spec.causal and spec.lse)
    return Expectation(tensor=32, local_memory=waiting, instructions=(
        "UTMALDG", "USETMAXREG", "STSM", "STG.E.128", *["MUFU.TANH"] * spec.softcap),
                       roles=((few, 1), (scores, 1), (out, PARTS)))
