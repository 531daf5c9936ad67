"""What the tests of float8 attention over packed sequences on a GPU share: inputs, the call, and the judgement of each
sequence by itself."""
import math
from itertools import pairwise

import torch

import tkq
from tests.helpers.attention.fp8 import F8, judge, quantised
from tests.helpers.attention.varlen_inputs import cumulated
from tests.helpers.sanitizer.nan_fill import poisoned
from tkq.attention.fp8 import varlen_launch
from tkq.attention.fp8.check import Call, Lengths, Options

NAN = 0x7F
EDGES = [(1, 1), (0, 0), (513, 127), (128, 128), (127, 129), (129, 0), (1, 900), (0, 70), (65, 257), (300, 100),
         (2, 63)]
NAMES = "q", "k", "v"


def make(lengths, heads, kv_heads, dim, spare=0, seed=0, scale=1.0) -> dict:
    """The tensors of a call: each sequence with descales of its own, of other sizes; ``spare`` rows of NaN behind the
    last one."""
    g = torch.Generator("cuda").manual_seed(seed + len(lengths))
    new = lambda rows, h: torch.randn(1, rows, h, dim, device="cuda", generator=g)
    parts = [quantised(scale * new(rows, heads), new(keys, kv_heads), new(keys, kv_heads) * (1 + s % 3))
             for s, (rows, keys) in enumerate(lengths)]
    behind = {n: torch.full((spare, parts[0][n].shape[2], dim), NAN, dtype=torch.uint8, device="cuda") for n in NAMES}
    given = {n: torch.cat([*(p[n][0].view(torch.uint8) for p in parts), behind[n]]).view(F8) for n in NAMES}
    given |= {f"{n}_descale": torch.cat([p[f"{n}_descale"] for p in parts]) for n in NAMES}
    cu_q, cu_k = (cumulated(n) for n in zip(*lengths, strict=True))
    return given | dict(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)


def call(given, config=None, accumulate="two_level", out_dtype=torch.bfloat16, return_lse=True, longest=4096,
         **options):
    """(o, lse), outputs and workspace poisoned. config: instead of the plan's."""
    with poisoned():
        if config is None:
            window = options.pop("left", -1), options.pop("right", -1)
            found = tkq.flash_attn_fp8_varlen(**given, max_seqlen_q=longest, max_seqlen_k=longest, **options,
                                              window_size=window, accumulate=accumulate, out_dtype=out_dtype,
                                              return_lse=return_lse)
            return found if return_lse else (found, None)
        return varlen_launch.attend(
            Call(*(given.get(n) for n in Call._fields)), Lengths(*(given.get(n) for n in Lengths._fields[:5])),
            Options(**options, accumulate=accumulate, out_dtype=out_dtype, return_lse=return_lse), config)


def rows_of(given, which) -> list:
    """(first row, end) of each sequence, as far as it is in use; which: "q" or "k"."""
    cu, used = given[f"cu_seqlens_{which}"].tolist(), given.get(f"seqused_{which}")
    ends = [b if used is None else min(b, a + int(used[s])) for s, (a, b) in enumerate(pairwise(cu))]
    return list(zip(cu, ends))


def compare(given, what="", config=None, accumulate="two_level", out_dtype=torch.bfloat16, return_lse=True, ulps=1,
            every=1, **options):
    """Judge o and lse of each sequence, and that all other rows saw nothing. every: n-th sequence, and the last."""
    scores = options.pop("scores", 2.0**-10)  # of `fp8.judge`
    o, lse = call(given, config, accumulate, out_dtype, return_lse, **options)
    outside = torch.ones(o.shape[0], dtype=torch.bool, device="cuda")
    queries, keys = rows_of(given, "q"), rows_of(given, "k")
    for s, ((a, b), (c, d)) in enumerate(zip(queries, keys, strict=True)):
        outside[a:b] = False
        if d == c:
            assert not o[a:b].any() and (lse is None or (lse[:, a:b] == -math.inf).all()), f"{what}: no keys, {s}"
        elif b > a and (s % every == 0 or s == len(keys) - 1):
            one = dict(q=given["q"][None, a:b], k=given["k"][None, c:d], v=given["v"][None, c:d])
            one |= {n: given[n][s:s + 1] for n in ("q_descale", "k_descale", "v_descale") if n in given}
            judge(o[None, a:b], None if lse is None else lse[None, :, a:b], one,
                  f"{what} sequence {s}, {b - a} x {d - c}, {accumulate} {options}", accumulate, ulps, scores,
                  **options)
    assert torch.isfinite(o).all() and not o[outside].any(), f"{what}: rows of no sequence"
    if lse is not None:
        assert (lse[:, outside] == -math.inf).all() and not lse.isnan().any(), f"{what}: lse of rows of no sequence"
    return o, lse
