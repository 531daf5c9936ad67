"""docs/support.md: what each operation takes, asked of the specs and plans themselves.

A type, a size or an option stands in a table because the spec was made of it and the plan found a configuration; what
a spec refuses is left out. Tests compare the page with this (tests/cpu/test_docs.py), and its types with what calls on
CPU tensors take.
"""
from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable, Iterable

from tests.every_op import FUNCTIONS
from tests.launch_table import numbers
from tkq.attention import backward_plan, backward_spec
from tkq.attention import plan as attention_plan
from tkq.attention.spec import HEAD_DIMS, AttentionSpec
from tkq.gemm import fp8_spec, grouped_spec, narrow_config
from tkq.gemm import plan as gemm_plan
from tkq.gemm.epilogue import ACTIVATIONS, GATED, Epilogue
from tkq.gemm.spec import GemmSpec
from tkq.losses.spec import MAX_V, CrossEntropySpec
from tkq.norms import plan as norm_plan
from tkq.norms.spec import MAX_N, NormSpec
from tkq.pointwise.spec import MAX_ROTARY_DIM, GatedSpec, RopeSpec
from tkq.quantize.spec import GRANULARITIES, TileSpec
from tkq.softmax.spec import SoftmaxSpec

TYPES = ("bf16", "fp16", "fp32", "fp64", "e4m3", "e5m2")
PROCESSORS = 132  # of an H100
LENGTHS = {"short": f"to {attention_plan.SHORT - 1}", "medium": f"{attention_plan.SHORT} to {attention_plan.LONG - 1}",
           "long": f"from {attention_plan.LONG}"}
HEAD = """# What is supported

<!-- python -m docs.tools --write -->
Made from the specs and plans: what stands here was asked of them, and what they refuse is not here. A call that is
refused raises an exception which names the argument, what came and what is allowed. GPU: Hopper (compute capability
9.0) alone; CPU tensors take `tkq.reference`, by the same rules.
"""


def takes(make: Callable, *values) -> bool:
    """Is a spec made of these values, rather than refused?"""
    try:
        make(*values)
    except (TypeError, ValueError, NotImplementedError):
        return False
    return True


def taken(make: Callable, candidates: Iterable) -> list:
    """Those of the candidates that a spec is made of."""
    return [value for value in candidates if takes(make, value)]


def page() -> str:
    """All of it."""
    return "\n\n".join((HEAD.strip(), overview(), attention(), norms(), products(), rest())) + "\n"


# ---- the overview ----------------------------------------------------------------------------------------------


def types() -> dict[str, tuple[list, str]]:
    """{function: (element types of its main inputs, sizes)}."""
    norm = {kind: (taken(lambda t, kind=kind: NormSpec(kind, 8, t), TYPES), _columns("N", MAX_N, _norm_of(kind)))
            for kind in ("rmsnorm", "layernorm")}
    soft = taken(lambda t: SoftmaxSpec(8, t), TYPES), _columns("N", MAX_N, lambda n: SoftmaxSpec(n, "bf16"))
    loss = (taken(lambda t: CrossEntropySpec("forward", 8, t), TYPES),
            _columns("classes", MAX_V, lambda n: CrossEntropySpec("forward", n, "bf16")))
    heads = taken(lambda d: AttentionSpec(head_dim=d, head_dim_v=d), range(1, 300))
    dims = f"D and Dv: multiples of {heads[0]} to {heads[-1]}"
    flash = taken(lambda t: AttentionSpec(t), TYPES), f"any Sq, Sk; {dims}"
    half = taken(lambda t: GemmSpec(t), TYPES)
    gated = taken(lambda t: GatedSpec("swiglu", t), TYPES), "any"
    turned = (taken(lambda t: RopeSpec(t, "fp32", 64), TYPES),
              f"rotary dims: even, to {max(taken(lambda r: RopeSpec('bf16', 'fp32', r), (2, 64, MAX_ROTARY_DIM)))}")
    return {
        **norm, "rmsnorm_quant": norm["rmsnorm"], "layernorm_quant": norm["layernorm"],
        "softmax": soft, "log_softmax": soft, "cross_entropy": loss, "cross_entropy_and_gradient": loss,
        "linear_cross_entropy": (half, f"{loss[1]}; x's columns: a multiple of 8"),
        "swiglu": gated, "geglu": gated, "rope": turned, "rope_qk": turned,
        "flash_attn": flash, "flash_attn_varlen": (flash[0], f"sequences of any length, 0 too; {dims}"),
        "gemm": (half, "any M, N; K a multiple of 8"),
        "grouped_gemm": (taken(lambda t: _grouped(t, "m"), TYPES), f"to {grouped_spec.MOST_GROUPS} groups, of 0 rows "
                                                                     "too; K a multiple of 8, of float8 of 16"),
        "fp8_gemm": (taken(lambda t: fp8_spec.Fp8Spec(a=t), TYPES), f"any M, N; K a multiple of {fp8_spec.K_UNIT}"),
        "quantize_fp8": (taken(lambda t: TileSpec("block", t), TYPES), "any"),
    }


def overview() -> str:
    """A row a function: types and sizes from its spec, gradients and launches from the list that tests go through."""
    counted = numbers()
    rows = []
    for case in FUNCTIONS:
        of, sizes = types()[case.function]
        launches = counted[case.name]
        backward = str(launches[2] - launches[1]) if len(launches) > 1 else ""
        gradients = "yes" if case.leaves else "no"
        rows.append((f"`{case.function}`", ", ".join(of), sizes, gradients, str(launches[0]), backward))
    return _section("Operations", "Types are those of the main inputs: an operation's page of the API has the others, "
                    "and which inputs have gradients. Launches: of a small call and its backward, counted on an H100 "
                    "(see [launches](launches.md)).",
                    ("function", "types", "sizes", "gradients", "launches", "backward"), rows)


def _norm_of(kind):
    return lambda n: norm_plan.plan(NormSpec(kind, n, "bf16", vector=8 if n % 8 == 0 else 1))


def _columns(name, most, make) -> str:
    fits = takes(make, 1) and takes(make, 999) and takes(make, most) and not takes(make, most + 1)
    return f"{name} from 1 to {most}" if fits else f"{name}: see its page"


# ---- attention ---------------------------------------------------------------------------------------------------


def attention() -> str:
    """Tiles by head dim, plans by length, options that exclude each other."""
    intro = ("Head dims between two widths take the wider tile, filled up with zeros by TMA. Rows x keys of a block's "
             "tiles in the forward, by the length of the keys; c: causal has tiles of its own. Any D goes with any Dv: "
             "the tables show D = Dv.")
    rows = []
    for width, dims in itertools.groupby(HEAD_DIMS, _widths):
        dims = list(dims)
        rows.append((f"{dims[0]} to {dims[-1]}", str(width[0]), str(width[1]), *(_tiles(dims[-1], n) for n in LENGTHS)))
    head = ("head dims", "forward tile", "backward tile", *(f"{n} ({keys} keys)" for n, keys in LENGTHS.items()))
    pairs = [(a, b) for a, b in itertools.product(HEAD_DIMS, repeat=2) if not _planned(a, b)]
    all_pairs = (f"All {len(HEAD_DIMS) ** 2} pairs of D and Dv have a forward and a backward plan." if not pairs else
                 f"Without a plan: {pairs}.")
    return _section("Attention", intro, head, rows) + "\n\n" + textwrap.fill(f"{all_pairs} {_options()}", 120)


def _widths(dim):
    return AttentionSpec(head_dim=dim).kernel().head_dim, backward_spec.width(dim, dim)


def _tiles(dim, length):
    full, causal = (attention_plan.plan(AttentionSpec(head_dim=dim, causal=causal), length) for causal in (False, True))
    tile = f"{full.tile_rows} x {full.kv}"
    return tile if (full.tile_rows, full.kv) == (causal.tile_rows, causal.kv) else (
        f"{tile}, c {causal.tile_rows} x {causal.kv}")


def _planned(a, b):
    def both():
        spec = AttentionSpec(head_dim=a, head_dim_v=b)
        for length, causal in itertools.product(LENGTHS, (False, True)):
            attention_plan.plan(AttentionSpec(head_dim=a, head_dim_v=b, causal=causal), length)
        return spec, backward_plan.plan(backward_spec.BackwardSpec(width=backward_spec.width(a, b)))
    return takes(both)


def _options() -> str:
    """Which pairs of options a spec refuses."""
    options = {"causal": dict(causal=True), "a window's left": dict(left=True), "a window's right": dict(right=True),
               "softcap": dict(softcap=True), "sinks": dict(sinks="fp32"), "packed sequences": dict(varlen=True),
               "lse": dict(lse=True), "shared K/V heads": dict(pack=4)}
    refused = [f"{a} with {b}" for a, b in itertools.combinations(options, 2)
               if not takes(lambda a, b: AttentionSpec(**options[a], **options[b]), a, b)]
    return (f"Options: {', '.join(options)}. Any of them go together, but for {', '.join(refused)} (the same limit, "
            "said twice).")


# ---- norms -------------------------------------------------------------------------------------------------------


def norms() -> str:
    """Which threads share a row."""
    rows = []
    for n in (1024, 4096, 8192, 16384, 32768, 65536, 131072, MAX_N):
        cells = [f"{n}"]
        for kind, weight in (("rmsnorm", "bf16"), ("layernorm", "fp32")):
            c = norm_plan.plan(NormSpec(kind, n, "bf16", weight, vector=8))
            cells.append(f"{c.threads_per_row} threads" + f" in each of {c.cluster} blocks" * (c.cluster > 1)
                         + f", through {c.load} memory" * (c.load == "shared"))
        rows.append(tuple(cells))
    heads = ("Weight, bias and residual have types of their own (bf16, fp16, fp32), so have the result and the sum. "
             "How a row of bf16 is shared out:")
    quant = ", ".join(scale for scale in ("row", "block", "tile", "tensor")
                      if takes(lambda s: NormSpec("rmsnorm", 1024, "bf16", out="e4m3", scale=s), scale))
    return (_section("Norms", heads, ("N", "rmsnorm, weight in bf16", "layernorm, weight in fp32"), rows)
            + f"\n\n`rmsnorm_quant` and `layernorm_quant`: scales by {quant}.")


# ---- products ----------------------------------------------------------------------------------------------------


def products() -> str:
    """gemm, fp8_gemm, grouped_gemm."""
    return "\n\n".join((_gemm(), _fp8(), _grouped_table()))


def _gemm():
    out = taken(lambda t: GemmSpec(out=t), TYPES)
    alone = taken(lambda f: GemmSpec(epilogue=Epilogue(f), b_major="k"), (*ACTIVATIONS, *GATED))
    with_c = taken(lambda f: GemmSpec(epilogue=Epilogue(f, residual=True)), alone)
    intro = (f"Results: {', '.join(out)}. a and b: either dimension contiguous, 2-D or batched; strides and bases that "
             f"TMA cannot take go element by element. Activations: {_names(alone)}, and functions of your own; with "
             f"`c`: {_names(with_c)}, and your own. The kernel that is planned for some sizes of bf16 on {PROCESSORS} "
             "processors:")
    rows = [(f"{m} x {n} x {k}", _gemm_tile(m, n, k)) for m, n, k in
            ((1, 4096, 4096), (64, 4096, 4096), (512, 4096, 4096), (2048, 2048, 2048), (4096,) * 3, (8192,) * 3)]
    return _section("gemm", intro, ("M x N x K", "planned"), rows)


def _list(values):
    return ", ".join(map(str, values))


def _names(values):
    return ", ".join(f"`{value}`" for value in values)


def _gemm_tile(m, n, k):
    spec = GemmSpec()
    recipe, _ = gemm_plan.launch(spec, m, n, k, PROCESSORS)
    config = recipe.args[1]
    if isinstance(config, narrow_config.NarrowConfig):
        return "a kernel for few rows"
    shared = f", in clusters of {config.cluster}" if config.cluster > 1 else ""
    return f"tiles of {config.m} x {config.n}, {config.stages} stages{shared}"


def _fp8():
    rows = []
    for scales in fp8_spec.SCALES:
        both = [how for promote, how in ((False, "fast"), (True, "fp32"))
                if takes(lambda s, p: fp8_spec.Fp8Spec(scales=s, promote=p), scales, promote)]
        at = lambda t, s=scales: fp8_spec.Fp8Spec(a=t, scales=s, promote=True)
        out = lambda t, s=scales: fp8_spec.Fp8Spec(out=t, scales=s, promote=True)
        rows.append((_SCALES[scales], ", ".join(taken(at, TYPES)), ", ".join(taken(out, TYPES)), ", ".join(both)))
    intro = ("K contiguous in a and b. Sums (`accumulate`): fast ones stay in the tensor cores, others are added up in "
             f"fp32 every {fp8_spec.GROUP} of K. Activations: {_names(fp8_spec.ACTIVATIONS)}. Bias: "
             f"{', '.join(fp8_spec.BIASES)}.")
    return _section("fp8_gemm", intro, ("scales of a, of b", "a and b", "results", "sums"), rows)


_SCALES = {"none": "none", "tensor": "one, one", "row": "a row, a column", "block": "1 x 128, 128 x 128",
           "line": "1 x 128, 1 x 128"}


def _grouped(dtype, along, scales=None, b_major=None, out="bf16"):
    narrow = dtype in fp8_spec.FP8
    scales = scales or ("row" if narrow else "none")
    major = b_major or ("k" if narrow or along == "m" else "n")
    return grouped_spec.GroupedSpec(along, dtype, dtype, out, scales, major)


def _grouped_table():
    rows = []
    for along, what in (("m", "rows of a: c[i] = a[i] @ b[g]"), ("k", "K: c[g] = a[:, g] @ b[g]")):
        for dtype in taken(lambda t, along=along: _grouped(t, along), TYPES):
            scales = taken(lambda s, d=dtype, al=along: _grouped(d, al, s), ("none", *fp8_spec.SCALES))
            majors = taken(lambda m, d=dtype, al=along: _grouped(d, al, None, m), ("k", "n"))
            out = taken(lambda t, d=dtype, al=along: _grouped(d, al, out=t), TYPES)
            shown = "; ".join(_SCALES[scale] for scale in scales)
            rows.append((what, dtype, shown, ", ".join(majors), ", ".join(out)))
    head = "groups along", "a and b", "scales of a, of b", "contiguous in b", "results"
    return _section("grouped_gemm", "", head, rows)


# ---- what is left ------------------------------------------------------------------------------------------------


def rest() -> str:
    """Losses, gates, rotary embeddings, quantisation."""
    targets = taken(lambda t: CrossEntropySpec("forward", 8, "bf16", t), ("uint8", "int16", "int32", "int64"))
    reductions = taken(lambda r: CrossEntropySpec("forward", 8, "bf16", reduction=r), ("none", "mean", "sum", "max"))
    options = dict(weight="fp32", smoothing=True, softcap=True)
    together = takes(lambda: CrossEntropySpec("forward", 8, "bf16", **options))
    together = " Class weights, label smoothing and softcap go together." * together
    packings = taken(lambda p: GatedSpec("swiglu", "bf16", p), ("apart", "split", "interleaved", "other"))
    tables = taken(lambda t: RopeSpec("bf16", t, 64), TYPES)
    index = taken(lambda t: RopeSpec("bf16", "fp32", 64, positions="ids", index=t), ("int16", "int32", "int64"))
    rows = []
    for name in GRANULARITIES:
        make = (lambda t: NormSpec("rmsnorm", 128, t, out="e4m3", scale="row")) if name == "row" else (
            lambda t, n=name: TileSpec(n, t))
        out = (lambda t: NormSpec("rmsnorm", 128, "bf16", out=t, scale="row")) if name == "row" else (
            lambda t, n=name: TileSpec(n, out=t))
        transpose = takes(lambda n: TileSpec(n, transpose=True), name)
        rows.append((name, ", ".join(taken(make, TYPES)), ", ".join(taken(out, TYPES)), "yes" if transpose else "no"))
    table = _section("quantize_fp8", "", ("granularity", "x", "result", "transpose too"), rows)
    return f"""## Losses, gates, rotary embeddings

- `cross_entropy`: targets in {_list(targets)}; reductions {_list(reductions)}.{together}
- `swiglu`, `geglu`: gate and up {_list(packings)}.
- `rope`, `rope_qk`: cos and sin in {_list(tables)}; positions in {_list(index)}; half-split or interleaved.

{table}"""


def _section(title, intro, head, rows) -> str:
    lines = [head, ("---",) * len(head), *rows]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return "\n\n".join(part for part in (f"## {title}", textwrap.fill(intro, 120), table) if part)
