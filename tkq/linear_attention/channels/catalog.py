"""The kernels of gates for each column that tkq itself can choose, and what their machine code must show."""
import itertools
from dataclasses import replace

from tkq.linear_attention.channels.launch import recipe, sums_recipe
from tkq.linear_attention.channels.plan import plan
from tkq.linear_attention.channels.spec import ChannelSpec
from tkq.linear_attention.spec import SuffixSpec
from tkq.linear_attention.suffix.launch import recipe as suffix_recipe
from tkq.runtime.compile.expectation import Expectation
from tkq.runtime.compile.recipe import Shipped

SIZES = (64, 128)


def shipped() -> list:
    """Forward and backward of bf16, K and V of 64 and 128; states that come in and go out of one size; the delta rule's
    of the width that models have. A kernel that is one and the other stands here once."""
    found = {}
    for name, spec in (*_of_sizes(), *_with_states(), *_delta_rule()):
        found.setdefault(recipe(spec), Shipped(name, recipe(spec), expectation(spec)))
    sums = Expectation(instructions=("LDG.E.64", "STG.E.64"))
    return [*found.values(), Shipped("linear_attn_dg-column", sums_recipe(2), sums),
            Shipped("gated_delta_rule_dg-column", sums_recipe(4), sums),
            Shipped("linear_attn_suffix_sums-column", suffix_recipe(SuffixSpec()), Expectation(instructions=("DADD",)))]


def _of_sizes():
    for K, V in itertools.product(SIZES, SIZES):
        end, spec = f"-bf16-k{K}-v{V}-column", ChannelSpec("bf16", V, K, of_values=True, dot=True)
        yield f"linear_attn{end}", ChannelSpec("bf16", K, V)
        yield f"linear_attn_dq{end}", spec
        yield f"linear_attn_dk{end}", replace(spec, reverse=True)
        yield f"linear_attn_dv{end}", ChannelSpec("bf16", K, V, reverse=True)


def _with_states():
    end, spec = "-bf16-k128-v128-column", ChannelSpec("bf16", 128, 128)
    yield f"linear_attn{end}-final", replace(spec, final="fp32")
    yield f"linear_attn{end}-states", replace(spec, initial="fp32", final="fp32")


def _delta_rule():
    """With kernels of linear attention's gradients, too."""
    for beta in ("fp32", "bf16"):
        end, spec = f"-bf16-k128-v128-column-beta_{beta}", ChannelSpec("bf16", 128, 128, delta=beta)
        yield f"gated_delta_rule{end}", spec
        yield f"gated_delta_rule_updates{end}", replace(spec, updates=True)
        yield f"gated_delta_rule_du{end}", replace(spec, reverse=True)
        if beta == "fp32":
            yield f"gated_delta_rule{end}-final", replace(spec, final="fp32")
            yield f"gated_delta_rule{end}-states", replace(spec, initial="fp32", final="fp32")
    for reverse, dot in itertools.product((False, True), (False, True)):
        if dot or not reverse:
            yield (f"gated_delta_rule_keys_{'behind' if reverse else 'before'}-bf16-k128-v128-column{'-dot' * dot}",
                   ChannelSpec("bf16", 128, 128, reverse=reverse, of_values=True, strict=True, dot=dot))


def expectation(spec: ChannelSpec) -> Expectation:
    """Products of all levels and of the state, a wait for four of each; loads by TMA. Where two warpgroups have the
    state, the scores' registers do not hold all that both of their ways (levels, `Square`) have from the start."""
    (few, some, many), groups = plan(spec).registers, plan(spec).groups
    steps = spec.head_dim // 16
    return Expectation(tensor=6 * (4 if spec.of_values else steps), waits_per_mma=0.4,
                       instructions=("UTMALDG", "USETMAXREG", *(() if spec.of_values else ("UTMASTG",))),
                       local_memory=24 if groups == 2 else 0,
                       roles=((few, 1), (some, 1), (many, groups)))
