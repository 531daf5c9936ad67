"""The kernels of gates for each column that tkq itself can choose, and what their machine code must show."""
import itertools
from dataclasses import replace

from tkq.linear_attention.channels.bounded.launch import recipe as bounded_recipe
from tkq.linear_attention.channels.bounded.plan import plan as bounded_plan
from tkq.linear_attention.channels.launch import recipe, sums_recipe
from tkq.linear_attention.channels.plan import plan, spilled
from tkq.linear_attention.channels.spec import BoundedReachSpec, ChannelSpec, SumsSpec
from tkq.runtime.compile.expectation import Expectation
from tkq.runtime.compile.recipe import Shipped

SIZES = (64, 128)


def shipped() -> list:
    """Forward and backward of bf16, K and V of 64 and 128; states that come in and go out of one size; the delta rule's
    of the width that models have. A kernel that is one and the other stands here once."""
    found = {}
    for name, spec in (*_of_sizes(), *_with_states(), *_delta_rule(), *_packed()):
        found.setdefault(recipe(spec), Shipped(name, recipe(spec), expectation(spec)))
    return [*found.values(), *_bounded(), *_sums()]


def _of_sizes():
    """dq and dk of heads that share none; of those that share one, whose sums are of fp32, at one size."""
    for K, V in itertools.product(SIZES, SIZES):
        end, spec = f"-bf16-k{K}-v{V}-column", ChannelSpec("bf16", V, K, of_values=True, dot=True, narrow=True)
        yield f"linear_attn{end}", ChannelSpec("bf16", K, V)
        yield f"linear_attn_dq{end}", spec
        yield f"linear_attn_dk{end}", replace(spec, reverse=True, sums=True)
        yield f"linear_attn_dv{end}", ChannelSpec("bf16", K, V, reverse=True)
    yield f"linear_attn_dq{end}-shared", replace(spec, narrow=False)
    yield f"linear_attn_dk{end}-shared", replace(spec, narrow=False, reverse=True, sums=True)


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
            for l2norm in (False, True):
                end, spec = f"{end}{'-l2norm' * l2norm}", replace(spec, l2norm=l2norm)
                yield f"gated_delta_rule{end}", spec
                yield f"gated_delta_rule{end}-final", replace(spec, final="fp32")
                yield f"gated_delta_rule{end}-states", replace(spec, initial="fp32", final="fp32")
    spec = ChannelSpec("bf16", 128, 128, of_values=True, dot=True, pairs=True)
    for narrow in (True, False):
        end, spec = "" if narrow else "-shared", replace(spec, narrow=narrow)
        yield f"gated_delta_rule_dq-bf16-k128-v128-column{end}", spec
        yield f"gated_delta_rule_dk-bf16-k128-v128-column{end}", replace(spec, reverse=True, sums=True, rest=True)


def _packed():
    """Sequences by cu_seqlens of 32 bits, states; and states in a pool."""
    end, spec = "-bf16-k128-v128-column-packed", ChannelSpec("bf16", 128, 128, "fp32", "fp32", packed="int32")
    delta, values = replace(spec, delta="fp32"), replace(spec, of_values=True, dot=True, narrow=True)
    behind = replace(values, final=None, reverse=True, sums=True, end=True)
    yield f"linear_attn{end}", spec
    yield f"linear_attn_dq{end}", values
    yield f"linear_attn_dk{end}", behind
    yield f"linear_attn_dv{end}", replace(spec, reverse=True)
    yield f"gated_delta_rule{end}", delta
    yield f"gated_delta_rule_updates{end}", replace(delta, final=None, updates=True)
    yield f"gated_delta_rule_du{end}", replace(delta, reverse=True)
    yield f"gated_delta_rule_dq{end}", replace(values, pairs=True)
    yield f"gated_delta_rule_dk{end}", replace(behind, pairs=True, rest=True)
    for op, one in (("linear_attn", spec), ("gated_delta_rule", delta)):
        yield f"{op}{end}-pool", replace(one, pool="int32")
        yield f"{op}-bf16-k128-v128-column-pool", replace(one, packed=None, pool="int32")


def _bounded():
    """Kimi's layer without gradients: no states, one that goes out, both; packed sequences; and of few long sequences
    segments, and what reaches them."""
    of_fp32 = ChannelSpec("bf16", 128, 128, delta="fp32", l2norm=True, bounded=True)
    states = replace(of_fp32, initial="fp32", final="fp32")
    for end, spec in (("fp32", of_fp32), ("bf16", replace(of_fp32, delta="bf16")),
                      ("fp32-final", replace(of_fp32, final="fp32")), ("fp32-states", states),
                      ("fp32-packed", replace(states, packed="int32")), ("fp32-reach", replace(of_fp32, reach=True)),
                      ("bf16-reach", replace(of_fp32, delta="bf16", reach=True)),
                      ("fp32-final-reach", replace(of_fp32, final="fp32", reach=True)),
                      ("fp32-states-reach", replace(states, reach=True))):
        some, many = bounded_plan(spec).registers
        wanted = Expectation(tensor=4 * (8 + 4), waits_per_mma=0.5, roles=((some, 2), (many, 2)), local_memory=6,
                             instructions=("UTMALDG", "UTMASTG", "USETMAXREG", "HMMA", "MUFU.EX2"))
        yield Shipped(f"gated_delta_rule-bf16-k128-v128-column-bounded-beta_{end}", bounded_recipe(spec), wanted)
    wanted = Expectation(instructions=("LDG.E.64", "SHFL", "MUFU.EX2"))
    for beta in ("fp32", "bf16"):
        yield Shipped(f"gated_delta_rule_reach-bf16-k128-column-bounded-beta_{beta}",
                      bounded_recipe(BoundedReachSpec(beta)), wanted)


def _sums():
    """Of gates' gradients where V takes two launches, without and with the final state's; totals of chunks where
    columns are few."""
    wanted = Expectation(instructions=("LDG.E", "STG.E", "DADD"))
    for end in (False, True):
        yield Shipped(f"linear_attn_dg-column{'-end' * end}", sums_recipe(SumsSpec(end=end)), wanted)
    yield Shipped("linear_attn_dg-column-packed", sums_recipe(SumsSpec(packed="int32")), wanted)
    yield Shipped("linear_attn_dg_totals-column", sums_recipe(SumsSpec("totals")),
                  Expectation(instructions=("LDG.E", "STG.E")))


def expectation(spec: ChannelSpec) -> Expectation:
    """Products of all levels and of the state, a wait for four of each; loads by TMA."""
    (few, some, many), groups = plan(spec).registers, plan(spec).groups
    steps = spec.head_dim // 16
    stores = not spec.of_values or spec.narrow or spec.dot
    return Expectation(tensor=6 * (4 if spec.of_values else steps), waits_per_mma=0.4,
                       instructions=("UTMALDG", "USETMAXREG", *(("UTMASTG",) if stores else ())),
                       local_memory=spilled(spec), roles=((few, 1), (some, 1), (many, groups)))
