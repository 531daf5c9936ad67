"""The kernels of linear attention that tkq itself can choose, and what their machine code must show."""
import itertools
from dataclasses import replace

from tkq.linear_attention.blocks.plan import by_blocks
from tkq.linear_attention.blocks.plan import plan as of_blocks
from tkq.linear_attention.launch import recipe
from tkq.linear_attention.plan import paired, plan, spilled
from tkq.linear_attention.spec import GATES, GROUP, LinearSpec, ProductsSpec, SsdSpec, StepSpec, SuffixSpec
from tkq.linear_attention.split.launch import recipe as combine_recipe
from tkq.linear_attention.split.spec import CombineSpec, ReachSpec
from tkq.linear_attention.suffix.launch import products_recipe
from tkq.linear_attention.suffix.launch import recipe as suffix_recipe
from tkq.linear_attention.token_rows.plan import GROUPS, by_rows
from tkq.linear_attention.token_rows.plan import plan as of_rows
from tkq.runtime.compile.expectation import Expectation
from tkq.runtime.compile.recipe import Shipped

SIZES = (64, 128)


def shipped() -> list:
    """Forward and backward of bf16, K and V of 64 and 128, each gate; states that come in and go out of one size; the
    delta rule's forward of the width that models have; packed sequences and pools of that width; Mamba-2's of its two
    usual sizes. A kernel that is one and the other stands here once."""
    found = {}
    for name, spec in (*_of_sizes(), *_with_states(), *_delta_rule(), *_packed(), *_ssd(), *_packed_ssd(),
                       *_segments()):
        found.setdefault(recipe(spec), Shipped(name, recipe(spec), expectation(spec)))
    return [*found.values(), *_sums(), *_combined(), *_of_one_group(), *_pairs()]


def _of_sizes():
    for K, V, gate in itertools.product(SIZES, SIZES, GATES):
        gated = gate != "none"
        end = f"-bf16-k{K}-v{V}-{gate}"
        yield f"linear_attn{end}", LinearSpec("bf16", K, V, gate)
        yield f"linear_attn_dq{end}", LinearSpec("bf16", V, K, gate, dot=gated)
        yield f"linear_attn_dk{end}", LinearSpec("bf16", V, K, gate, reverse=True)
        yield f"linear_attn_dv{end}", LinearSpec("bf16", K, V, gate, reverse=True, dot=gated)


def _with_states():
    end = "-bf16-k128-v128-token-states"
    yield f"linear_attn{end}", LinearSpec("bf16", 128, 128, "token", "fp32", "fp32")
    yield f"linear_attn_dq{end}", LinearSpec("bf16", 128, 128, "token", "fp32", "fp32", dot=True)
    yield f"linear_attn_dk{end}", LinearSpec("bf16", 128, 128, "token", "fp32", reverse=True)
    yield f"linear_attn_dv{end}", LinearSpec("bf16", 128, 128, "token", "fp32", "fp32", reverse=True, dot=True)


def _delta_rule():
    """With kernels of linear attention's gradients, too."""
    for gate, beta in itertools.product(("none", "token"), ("fp32", "bf16")):
        end, spec = f"-bf16-k128-v128-{gate}-beta_{beta}", LinearSpec("bf16", 128, 128, gate, delta=beta)
        yield f"gated_delta_rule{end}", spec
        for more, (out, known) in (("", ("out", "in")), ("-blocks", (None, None))):
            blocks = bool(more)
            yield f"gated_delta_rule_updates{end}{more}", replace(spec, updates=True, inverse=out, blocks=blocks)
            yield f"gated_delta_rule_du{end}{more}", replace(spec, reverse=True, dot=True, inverse=known, blocks=blocks)
    for gate, dot, beta in (("none", False, "fp32"), ("none", False, "bf16"), ("token", False, "fp32"),
                            ("token", True, "fp32"), ("token", True, "bf16")):
        end = f"-bf16-k128-v128-{gate}{'-dot' * dot}-beta_{beta}"
        spec = LinearSpec("bf16", 128, 128, gate, dot=dot, kept=beta)
        for summed in (False, True):
            more = "-summed" * summed
            yield f"gated_delta_rule_before{end}{more}", replace(spec, second="query", summed=summed)
            yield f"gated_delta_rule_behind{end}{more}", replace(spec, second="pair", reverse=True, summed=summed,
                                                                  less=True)
    for initial in (None, "fp32"):
        yield (f"gated_delta_rule-bf16-k128-v128-token-beta_fp32-{'states' if initial else 'final'}",
               LinearSpec("bf16", 128, 128, "token", initial, "fp32", delta="fp32"))
    for name, beta, initial, final in (("beta_fp32", "fp32", None, None), ("beta_bf16", "bf16", None, None),
                                       ("beta_fp32-final", "fp32", None, "fp32"),
                                       ("beta_fp32-states", "fp32", "fp32", "fp32")):
        yield (f"gated_delta_rule_overlapping-bf16-k128-v128-token-{name}",
               LinearSpec("bf16", 128, 128, "token", initial, final, delta=beta, reach=True))


def _ssd():
    """As models call it: P 64, dt of bf16 with a bias, softplus, D of each head; states that come in and go out."""
    for N, initial in itertools.product(SIZES, (None, "fp32")):
        final, end = initial, f"-bf16-n{N}-p64{'-states' if initial else ''}"
        plain = SsdSpec("bf16", "fp32", softplus=True)
        skip = replace(plain, skip="fp32")
        spec = LinearSpec("bf16", N, 64, "token", initial, final, ssd=skip, state_v_first=True)
        yield f"mamba2_ssd{end}", spec
        yield f"mamba2_ssd_gated{end}", replace(spec, ssd=replace(skip, gated=True))
        yield f"mamba2_ssd_not_gated{end}", replace(spec, final=None)  # once more, for z's gradient
        dc = LinearSpec("bf16", 64, N, "token", initial, final, dot=True, ssd=plain)
        db = LinearSpec("bf16", 64, N, "token", initial, reverse=True, ssd=plain)
        yield from _of_heads(f"mamba2_ssd_dc{end}", dc)
        yield from _of_heads(f"mamba2_ssd_db{end}", db)
        yield f"mamba2_ssd_dx{end}", replace(spec, reverse=True, dot=True, ssd=replace(skip, skip_gradient=True))
    yield "mamba2_ssd-bf16-n128-p64-final", replace(spec, initial=None)


def _of_heads(name, spec):
    """Outputs of each head, and of two that share V's tensor, where those are added up before they are written."""
    yield name, spec
    if spec.value_dim > GROUP:
        yield f"{name}-summed", replace(spec, summed=True)


def _pairs():
    """Of two heads a block: Mamba-2's, which share B and C, and linear attention's, which share q and k, forward, and
    backward dv's where gates get no gradient."""
    for name, spec in (*_ssd(), *_of_sizes()):
        if paired(spec) and name.startswith(("mamba2_ssd", "linear_attn-")) and not spec.reverse:
            yield Shipped(f"{name}-pairs", recipe(spec, heads=2), expectation(spec, 2))
    for K, gate in itertools.product(SIZES, GATES):
        spec = LinearSpec("bf16", K, 64, gate, reverse=True)
        yield Shipped(f"linear_attn_dv-bf16-k{K}-v64-{gate}-pairs", recipe(spec, heads=2), expectation(spec, 2))
    for N in SIZES:  # segments of few long sequences, Mamba-2's
        for part, spec in _ssd_segments(N):
            yield Shipped(f"mamba2_ssd_{part}-bf16-k{N}-v64-token-pairs", recipe(spec, heads=2), expectation(spec, 2))


def _packed_ssd():
    """Sequences by cu_seqlens of 32 bits, N 128, states; and states in a pool."""
    plain = SsdSpec("bf16", "fp32", softplus=True)
    skip, end = replace(plain, skip="fp32"), "-bf16-n128-p64-packed"
    spec = LinearSpec("bf16", 128, 64, "token", "fp32", "fp32", ssd=skip, state_v_first=True, packed="int32")
    gated = replace(spec, ssd=replace(skip, gated=True))
    for name, one in (("mamba2_ssd", spec), ("mamba2_ssd_gated", gated)):
        yield f"{name}{end}", one
        yield f"{name}{end}-pool", replace(one, pool="int32")
    yield f"mamba2_ssd_not_gated{end}", replace(spec, final=None)
    dc = LinearSpec("bf16", 64, 128, "token", "fp32", "fp32", dot=True, ssd=plain, packed="int32")
    db = LinearSpec("bf16", 64, 128, "token", "fp32", reverse=True, ssd=plain, packed="int32")
    yield from _of_heads(f"mamba2_ssd_dc{end}", dc)
    yield from _of_heads(f"mamba2_ssd_db{end}", db)
    yield f"mamba2_ssd_dx{end}", replace(spec, reverse=True, dot=True, ssd=replace(skip, skip_gradient=True))


def _sums():
    """What gates' gradients are made of, linear attention's, of V and K of 64 and 128, and Mamba-2's, whose V is 64,
    without and with the final state's; those of packed sequences; and what states add where segments end."""
    steps = StepSpec("bf16", "fp32", softplus=True)
    kinds = [(x, less, None) for x, less in itertools.product((1, 2), repeat=2)] + [(1, 1, steps), (2, 1, steps)]
    found = [SuffixSpec(x, less, end=end, steps=of) for (x, less, of), end in itertools.product(kinds, (False, True))]
    for spec in (*found, SuffixSpec(2, 2, end=True, packed="int32"),
                 SuffixSpec(2, 1, end=True, packed="int32", steps=steps)):
        op = "mamba2_ssd_steps" if spec.steps else "linear_attn_suffix_sums"
        name = f"{op}-{spec.x}-{spec.less}{'-end' * spec.end}"
        yield Shipped(name + "-packed" * bool(spec.packed), suffix_recipe(spec), Expectation(instructions=("DADD",)))
    for K in SIZES:
        yield Shipped(f"linear_attn_state_products-k{K}", products_recipe(ProductsSpec(K)),
                      Expectation(instructions=("LDG.E.128", "FFMA")))


def _packed():
    """Sequences by cu_seqlens of 32 bits, gates of tokens, states; and states in a pool."""
    end = "-bf16-k128-v128-token-packed"
    spec = LinearSpec("bf16", 128, 128, "token", "fp32", "fp32", packed="int32")
    delta = replace(spec, delta="fp32")
    yield f"linear_attn{end}", spec
    yield f"linear_attn_dq{end}", replace(spec, dot=True)
    yield f"linear_attn_dk{end}", replace(spec, final=None, reverse=True)
    yield f"linear_attn_dv{end}", replace(spec, reverse=True, dot=True)
    yield f"gated_delta_rule{end}", delta
    yield f"gated_delta_rule_updates{end}", replace(delta, final=None, updates=True, blocks=True)
    yield f"gated_delta_rule_du{end}", replace(delta, reverse=True, dot=True, blocks=True)
    for op, one in (("linear_attn", spec), ("gated_delta_rule", delta)):
        yield f"{op}{end}-pool", replace(one, pool="int32")
        yield f"{op}-bf16-k128-v128-token-pool", replace(one, packed=None, pool="int32")


def _segments():
    """Of few long sequences: the forwards of the width that models have."""
    plain = LinearSpec("bf16", 128, 128, "token", None, "fp32", part="states")
    delta = replace(plain, delta="fp32", inverse="out", reach=True, halves=True)
    back = replace(delta, inverse=None, reverse=True, blocks=True)
    yield "gated_delta_rule_transfers-bf16-k128-v128-token", replace(delta, part="transfers", inverse="in",
                                                                     halves=False)
    yield "gated_delta_rule_du_states-bf16-k128-v128-token", back
    yield "gated_delta_rule_du_outputs-bf16-k128-v128-token", replace(
        back, initial="fp32", final=None, part="outputs", dot=True, reach=False, halves=False)
    for name, spec in (("linear_attn", plain), ("linear_attn", replace(plain, gate="head")),
                       ("linear_attn", replace(plain, gate="none")), ("gated_delta_rule", delta)):
        end = f"-bf16-k{spec.head_dim}-v{spec.value_dim}-{spec.gate}"
        outputs = replace(spec, initial="fp32", final=None, part="outputs", inverse=None, blocks=bool(spec.delta),
                          reach=False, halves=False)
        yield f"{name}_states{end}", spec
        if spec.delta:
            yield f"{name}_outputs_updates{end}", replace(outputs, updates=True)
        yield f"{name}_outputs{end}", outputs
    for part, spec in _ssd_segments(128):
        yield f"mamba2_ssd_{part}-bf16-k128-v64-token", spec


def _ssd_segments(N):
    """What makes states of segments, and outputs."""
    spec = LinearSpec("bf16", N, 64, "token", None, "fp32", ssd=SsdSpec("bf16", "fp32", True), state_v_first=True,
                      part="states")
    yield "states", spec
    yield "outputs", replace(spec, initial="fp32", final=None, part="outputs", ssd=replace(spec.ssd, skip="fp32"))


def _combined():
    """States that segments begin with, of calls without and with states; of gates also with the last one alone."""
    ends = ("", None, None), ("-states", "fp32", "fp32"), ("-final", None, "fp32")
    for K, transfer, (end, first, last) in itertools.product(SIZES, ("none", "heads", "matrix"), ends):
        if (K == 128 and end != "-final") or transfer == "heads":
            wanted = ("FFMA",) if transfer == "matrix" else ("LDG.E.128", "STG.E.128")
            yield Shipped(f"linear_attn_combined-k{K}-{transfer}{end}",
                          combine_recipe(CombineSpec(K, transfer, first, last)), Expectation(instructions=wanted))
    for name, one in (("", CombineSpec(128, "matrix", reach=True, halves=True)),
                      ("_du", CombineSpec(128, "transposed", reverse=True, reach=True, halves=True))):
        yield Shipped(f"gated_delta_rule{name}_combined-k128", combine_recipe(one), Expectation(instructions=("FFMA",)))
    for name, beta in (("", "fp32"), ("-beta_bf16", "bf16")):
        yield Shipped(f"gated_delta_rule_reach-bf16-k128{name}", combine_recipe(ReachSpec("bf16", 128, beta)),
                      Expectation(instructions=("LDG.E.128", "FFMA")))


def _of_one_group():
    """64 columns of V a block, where sequences are few: the delta rule's forward."""
    spec = LinearSpec("bf16", 128, 128, "token", delta="fp32")
    few, some, many = plan(spec, 1).registers
    wanted = replace(expectation(replace(spec, checkpoints="fp32")), roles=((few, 1), (some, 1), (many, 1)))
    yield Shipped("gated_delta_rule-bf16-k128-v128-token-beta_fp32-columns", recipe(spec, 1), wanted)


def expectation(spec: LinearSpec, heads: int = 1) -> Expectation:
    """Products of the scores, of the state with queries, and of values with both; loads and stores by TMA. Where
    corrected values come out, there are as many with keys; where states alone do, without the delta rule, the product
    that makes them, of 64 tokens, and waits of roles that have none. Of the delta rule by blocks those of each: where
    sequences are packed, segments have outputs or overlap, a thread may spill up to four numbers."""
    if heads == 1 and by_blocks(spec):
        few, some, many = of_blocks(spec).registers
        back = (spec.writes + spec.head_dim // 64) * spec.reverse
        tensor = 4 * (spec.head_dim // 16 + 3 + spec.head_dim // 64 + back)
        waits = 1 + 4 * (3 + spec.has_x)  # as many as the source has
        return Expectation(tensor=tensor, waits_per_mma=waits / tensor, roles=((few, 1), (some, 1), (many, 2)),
                           instructions=("UTMALDG", *("UTMASTG",) * spec.writes, "USETMAXREG", "HMMA"),
                           local_memory=8 * bool(spec.packed) * (1 + 2 * spec.reverse)
                           + 16 * (spec.part == "outputs") + (20 if spec.final else 4) * spec.overlapping)
    if heads == 1 and by_rows(spec):
        few, some, many = of_rows(spec).registers
        return Expectation(tensor=spec.head_dim // 16 * 2 + 8, waits_per_mma=0.5,
                           instructions=("UTMALDG", "UTMASTG", "USETMAXREG"), local_memory=spilled(spec),
                           roles=((few, 1), (some, 1), (many, GROUPS)))
    config = plan(spec, heads=heads)
    (few, some, many), groups = config.registers, config.groups
    roles = (few, 1), (some, config.scores), (many, groups)
    if not spec.writes:
        products = 4 * (1 + (4 if spec.inverse == "out" else 3) * bool(spec.delta))
        return Expectation(tensor=products, waits_per_mma=1.5, local_memory=spilled(spec),
                           instructions=("UTMALDG", "USETMAXREG"), roles=roles,
                           absent=("UTMASTG",) * (spec.inverse != "out"))
    return Expectation(tensor=spec.head_dim // 16 * 2 + 8, waits_per_mma=0.5,
                       instructions=("UTMALDG", "UTMASTG", "USETMAXREG"), local_memory=spilled(spec), roles=roles)
