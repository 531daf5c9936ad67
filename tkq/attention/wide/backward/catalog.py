"""The backward's kernels for wide heads that tkq itself can choose, and what their machine code must show: each width,
causal or not; and every choice together."""
import itertools

from tkq.attention.wide.backward.plan import plan, recipe
from tkq.attention.wide.backward.spec import WideBackwardSpec
from tkq.attention.wide.config import PARTS
from tkq.attention.wide.spec import WIDTHS
from tkq.runtime.compile.expectation import Expectation
from tkq.runtime.compile.recipe import Shipped


def shipped():
    """Names are unique: attention_backward, dtype, width, choices."""
    plain = (WideBackwardSpec(dtype, width, right=right)
             for dtype, width, right in itertools.product(("bf16", "fp16"), WIDTHS, (False, True)))
    more = (WideBackwardSpec("bf16", 512, True, True), WideBackwardSpec("bf16", 512, right=True, varlen=True),
            WideBackwardSpec("bf16", 512, True, True, False, True, True, True, True, True))
    return [Shipped(_name(spec), recipe(spec, plan(spec)), _expectation(spec, plan(spec))) for spec in (*plain, *more)]


def _name(spec):
    flags = ("left", "right", "dlse", "softcap", "varlen", "seqused_q", "seqused_k")
    flags = [flag for flag in flags if getattr(spec, flag)]
    return "_".join(("attention_backward", spec.dtype, f"d{spec.width}", *flags, *["no_dq"] * (not spec.dq)))


def _expectation(spec, configs):
    """Tensor cores not serialised, TMA in, registers handed between the roles. At 320 columns, and with a window's
    both edges, numbers of the task wait on the stack."""
    few, scores, out = configs[0].registers
    waiting = 10 * (spec.width == 320 or (spec.left and spec.right))
    return Expectation(tensor=32, local_memory=waiting, instructions=("UTMALDG", "USETMAXREG", "STSM", "STG.E.128"),
                       roles=((few, 1), (scores, 1), (out, PARTS)),
                       others=(("RowStats", Expectation(instructions=("LDG.E.128",))),))
