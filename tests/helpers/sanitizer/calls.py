"""One small call of each kind of kernel that is not attention, beside the same call on the CPU; for a sanitizer.

    python -m tests.helpers.sanitizer.calls [FAMILY ...] [--list]

`tests/gpu/testing/test_sanitizer.py` runs it under compute-sanitizer. Inputs are made on the CPU, so that hardly a
kernel but ours is launched. A line a case, "ok" or "BAD"; exit status 1 if one was bad.
"""
from __future__ import annotations

import argparse
import sys

import torch
from torch.autograd import grad

from tkq.runtime.compile import build

BF16 = torch.bfloat16
LIMIT = 0.02  # of the largest value of a result: bf16 on both sides
LIMITS = {"quant": 0.08, "quantise": 0.08, "float8": 0.08}  # one step of e4m3


def randn(seed: int, *shape, dtype=BF16, grad=False):
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return made.requires_grad_(grad)


def on(device, *tensors):
    """Copies there, which require a gradient where the originals do."""
    return [t.detach().to(device).requires_grad_(t.requires_grad) for t in tensors]


def norms(device):
    """Forward and backward, rows of a warp, of a block and of a cluster, and rows that bulk copies cannot take.
    With float32 weight and bias layernorm of 65536 columns takes three rows at once, and blocks of 131072 ones stay."""
    import tkq

    for M, N in ((37, 1024), (150, 4096), (5, 32768), (21, 65536), (19, 131072), (9, 1001)):
        for op in (tkq.rmsnorm, tkq.layernorm):
            x, weight, bias, dy = on(device, randn(0, M, N, grad=True), randn(1, N, dtype=torch.float32, grad=True),
                                     randn(2, N, dtype=torch.float32, grad=True), randn(3, M, N))
            y = op(x, weight, bias=bias)
            yield f"{op.__name__} {M} x {N}", (y, *grad(y, (x, weight, bias), dy))
            if N in (1024, 131072):  # without what a backward needs: kernels of other classes
                yield f"{op.__name__} {M} x {N} alone", (op(x.detach(), weight.detach(), bias=bias.detach()),)


def residents(device):
    """layernorm's backward with two blocks on a multiprocessor, as for many rows, whose rows are whole or halves."""
    from tkq.norms.backward.catalog import spec
    from tkq.norms.backward.kernel import LayerNormBackward
    from tkq.norms.backward.ops import norm_backward
    from tkq.rows.persistent.variants import variants

    M, N = 600, 4096
    x = randn(1, M, N)
    mean = x.float().mean(-1)
    rstd = torch.rsqrt((x.float() - mean[:, None]).square().mean(-1) + 1e-5)
    dy, x, weight, rstd, mean = on(device, randn(0, M, N), x, randn(2, N), rstd, mean)
    plans = variants(spec("layernorm", N).shape)
    for name in ("planned", "two blocks of 8", "halves two blocks of 4"):
        if device == "cpu":
            yield name, norm_backward("layernorm", dy, x, weight, rstd, mean, needs=(True, True, True))[:3]
            continue
        found = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)
        LayerNormBackward.launch(plan=plans[name], dy=dy, x=x, weight=weight, rstd=rstd, mean=mean,
                                 **dict(zip(("dx", "dweight", "dbias"), found)))
        yield name, found


def heads(device):
    """Each head with a weight of its own, in a slice of a packed tensor; and the sum with a residual."""
    import tkq

    packed, weight, dy = on(device, randn(0, 2, 9, 3, 4, 128), randn(1, 4, 128, grad=True), randn(2, 2, 9, 4, 128))
    x = packed[:, :, 1].requires_grad_()
    for op in (tkq.rmsnorm, tkq.layernorm):
        y = op(x, weight)
        yield f"{op.__name__} of heads", (y, *grad(y, (x, weight), dy))
    x, residual, weight, dy = on(device, randn(0, 37, 1024, grad=True), randn(1, 37, 1024, grad=True),
                                 randn(2, 1024, grad=True), randn(3, 37, 1024))
    y, total = tkq.rmsnorm(x, weight, residual=residual, prenorm=True)
    yield "rmsnorm + residual", (y, total, *grad((y, total), (x, residual, weight), (dy, dy)))


def softmax(device):
    import tkq

    # 8 rows of 50257 are whole units of 16 bytes: a row's last access may reach over its end, to the end of such a unit
    for M, N in ((37, 1000), (5, 8192), (8, 50257), (3, 131072), (2, 262144)):
        x, dy = on(device, randn(0, M, N, grad=True), randn(1, M, N))
        y = tkq.softmax(x)
        yield f"softmax {M} x {N}", (y, *grad(y, x, dy))


def cross_entropy(device):
    """Rows that are held, rows that are streamed, and rows of a cluster."""
    import tkq
    from tkq.losses.ops import cross_entropy_and_gradient

    for M, V, options in ((37, 1000, {}), (5, 8192, {}), (8, 50257, {}), (3, 131072, {}),
                          (3, 131072, dict(label_smoothing=0.1)), (3, 131072, dict(reduction="none"))):
        target = torch.arange(M) * 7
        x, t = on(device, randn(0, M, V, grad=True), target)
        loss = tkq.cross_entropy(x, t, **options)
        yield f"cross_entropy {M} x {V} {options}", (loss, *grad(loss, x, torch.ones_like(loss)))
    x, t = on(device, randn(0, 5, 32000), torch.arange(5))
    yield "both in one pass", cross_entropy_and_gradient(x, t)


def linear(device):
    import tkq

    x, weight, t, dloss = on(device, randn(0, 128, 64, grad=True), randn(1, 512, 64, grad=True), torch.arange(128),
                             torch.ones(()))
    loss = tkq.linear_cross_entropy(x, weight, t)
    yield "linear_cross_entropy", (loss, *grad(loss, (x, weight), dloss))


def quant(device):
    import tkq

    for N in (1024, 4160):
        for granularity in ("row", "1x128"):
            x, weight = on(device, randn(0, 9, N), randn(1, N))
            q, scale = tkq.rmsnorm_quant(x, weight, granularity=granularity)
            yield f"rmsnorm_quant {N} {granularity}", (q, scale)
    for N in (1024, 131072):  # a block to a row; a cluster
        x, weight = on(device, randn(0, 5, N), randn(1, N))
        q, scale = tkq.layernorm_quant(x, weight)
        yield f"layernorm_quant {N}", (q, scale)
    for op, granularity in ((tkq.rmsnorm_quant, "row"), (tkq.layernorm_quant, "1x128")):  # blocks that stay
        x, weight, bias = on(device, randn(0, 19, 131072), *(randn(i, 131072).float() for i in (1, 2)))
        q, scale = op(x, weight, bias=bias, granularity=granularity)
        yield f"{op.__name__} with float32 vectors {granularity}", (q, scale)
    x, residual, weight, bias = on(device, *(randn(i, 19, 131072) for i in (0, 1)),
                                   *(randn(i, 131072).float() for i in (2, 3)))
    q, scale, h = tkq.layernorm_quant(x, weight, bias, residual=residual, prenorm=True)
    yield "layernorm_quant + residual with float32 vectors", (q, scale, h)


def rope(device):
    import tkq

    for interleaved in (False, True):
        x, cos, sin, dy = on(device, randn(0, 2, 33, 3, 64, grad=True), *tkq.rope_cos_sin(40, 64, device="cpu"),
                             randn(1, 2, 33, 3, 64))
        y = tkq.rope(x, cos, sin, interleaved=interleaved)
        yield f"rope {interleaved}", (y, *grad(y, x, dy))
    q, k, cos, sin = on(device, randn(0, 66, 4, 64), randn(1, 66, 2, 64), *tkq.rope_cos_sin(40, 64, device="cpu"))
    starts, places = on(device, torch.tensor([0, 33, 33, 66], dtype=torch.int32), torch.arange(66) % 40)
    yield "rope_qk of packed sequences", tkq.rope_qk(q, k, cos, sin, cu_seqlens=starts)
    yield "rope_qk by positions", tkq.rope_qk(q[None], k[None], cos, sin, position_ids=places[None])


def gated(device):
    import tkq

    for op in (tkq.swiglu, tkq.geglu):
        for N in (1000, 4096):
            gate, up, dy = on(device, randn(0, 9, N, grad=True), randn(1, 9, N, grad=True), randn(2, 9, N))
            y = op(gate, up)
            yield f"{op.__name__} {N}", (y, *grad(y, (gate, up), dy))


def gemm(device):
    """By TMA, with an epilogue that is held; with few rows, whose K is split; operands that TMA does not take, copied
    and, where K is short, read one element at a time; blocks that keep pace."""
    import tkq

    for m, n, k, activation, first in ((300, 264, 200, None, 0), (300, 264, 200, "silu", 0), (5, 264, 1032, None, 0),
                                       (70, 65, 72, None, 1), (70, 65, 24, None, 1)):
        a, b, bias = on(device, randn(0, m, k + first), randn(1, n, k).t(), randn(2, n))
        yield f"gemm {m} x {n} x {k} {activation}", (tkq.gemm(a[:, first:], b, bias=bias, activation=activation),)
    a, b = on(device, randn(0, 3, 70, 200), randn(1, 3, 136, 200).mT)
    yield "gemm of a batch", (tkq.gemm(a, b),)
    from tkq.gemm.dense import launch
    from tkq.gemm.dense.config import Config

    a, b = on(device, randn(0, 600, 1032), randn(1, 520, 1032).t())
    c = torch.empty(600, 520, device=device, dtype=BF16)
    if device == "cpu":
        c = tkq.gemm(a, b)
    else:
        launch.run(a, b, c, Config(overlap_epilogue=1, pdl=True, wave_sync=16), 4)
    yield "gemm, keeping pace", (c,)


def fp8(device):
    import tkq

    for rows, k, granularity, of_b in (
            (300, 272, "row", "row"), (300, 272, "1x128", "128x128"), (300, 272, "1x128", "1x128"),
            (33, 272, "row", "row"), (33, 272, "1x128", "128x128"),
            (9, 272, "row", "row"), (9, 2320, "1x128", "128x128"), (65, 4112, "row", "row"),
            (300, 4112, "row", "row"), (300, 4112, "1x128", "128x128")):
        a, sa, b, sb = on(device, *tkq.quantize_fp8(randn(0, rows, k), granularity),
                          *tkq.quantize_fp8(randn(1, 264, k), of_b))
        yield f"fp8_gemm {rows} {k} {granularity} {of_b}", (tkq.fp8_gemm(a, b.t(), sa, sb.t()),)
    from dataclasses import replace

    from tkq.gemm.fp8 import ops, plan
    from tkq.gemm.fp8.spec import Fp8Spec

    block = Fp8Spec(scale_a="1x128", scale_b="128x128", promote=True)
    curved = Fp8Spec(scale_a="1x128", scale_b="128x128", promote=True, bias="bf16", activation="gelu")
    # two blocks: each has tiles to write under the next; and steps of which a part is added up under the others
    for name, spec, config, of_b, k in (
            ("several tiles a block", Fp8Spec(scale_a="row", scale_b="row"), plan.FAST[0], "row", 272),
            ("rolling halves", block, plan.PROMOTED[1], "128x128", 2320),
            ("rolling quarters", block, plan.BLOCKS[0], "128x128", 2320),
            *((f"subtiles that wait, {tile.n} columns", curved, plan.configure_epilogue(tile, curved), "128x128", 2320)
              for tile in (plan.BLOCKS[0], plan.PROMOTED[1])),
            ("keeping pace", block, replace(plan.PROMOTED[1], wave_sync=16), "128x128", 2320)):
        a, sa, b, sb = on(device, *tkq.quantize_fp8(randn(0, 600, k), "row" if of_b == "row" else "1x128"),
                          *tkq.quantize_fp8(randn(1, 520, k), of_b))
        bias, = on(device, randn(2, 520)) if spec.bias else (None,)
        if device == "cpu":
            c = tkq.fp8_gemm(a, b.t(), sa, sb.t(), bias=bias, activation=spec.activation)
        else:
            c = torch.empty(600, 520, device=device, dtype=BF16)
            ops.run(spec, a, b.t(), sa, sb.t(), c, plan.fit_to_spec(config, spec), 2, bias=bias)
        yield f"fp8_gemm, {name}", (c,)


def quantise(device):
    """Whole vectors and not, with the transpose; by rows and by blocks also without, which are other kernels."""
    import tkq

    for m, n in ((136, 272), (150, 333)):
        for granularity in ("tensor", "row", "1x128", "128x128"):
            x, = on(device, randn(0, m, n))
            yield f"quantize_fp8 {m} x {n} {granularity}", tkq.quantize_fp8(x, granularity, transpose=True)
        for granularity in ("row", "1x128"):
            yield f"quantize_fp8 {m} x {n} {granularity} alone", tkq.quantize_fp8(x, granularity)
    x, = on(device, randn(0, 3, 262400))  # rows longer than a kernel holds
    yield "quantize_fp8 3 x 262400 row", tkq.quantize_fp8(x, "row")
    for m, n in ((700, 1100), (2056, 2180)):  # both halves of a workspace; and more tiles than fit on the GPU at once
        x, = on(device, randn(0, m, n))
        for granularity in ("tensor", "row"):
            yield f"quantize_fp8 {m} x {n} {granularity}", tkq.quantize_fp8(x, granularity, transpose=True)


def grouped(device):
    """Rows of groups, and gradients of their weights; of float8 the two halves of a block write one mask (the same
    numbers twice), which racecheck may call a hazard."""
    import tkq

    ends = torch.tensor([100, 100, 101, 300], dtype=torch.int32)
    x, y, b, offsets = on(device, randn(0, 304, 136), randn(1, 304, 264), randn(2, 4, 136, 264), ends)
    yield "grouped_gemm", (tkq.grouped_gemm(x, b, offsets)[:300],)
    if device == "cpu":
        c = tkq.grouped_gemm(x, b, offsets)
    else:
        from tkq.gemm.grouped import ops as grouped_ops
        from tkq.gemm.grouped import plan as grouped_plan
        from tkq.gemm.grouped.spec import GroupedSpec

        spec, c = GroupedSpec(b_major="n"), torch.zeros(304, 264, device=device, dtype=BF16)
        grouped_ops.run(spec, x, b, c, offsets, config=grouped_plan.fit_to_spec(grouped_plan.FAST[0], spec), blocks=2)
    yield "grouped_gemm of several tiles a block", (c[:300],)
    yield "grouped_gemm along K", (tkq.grouped_gemm(x.t(), y, offsets),)
    found = (*tkq.quantize_fp8(randn(0, 304, 128), "1x128", transpose=True)[2:],
             *tkq.quantize_fp8(randn(1, 304, 264), "1x128", transpose=True)[2:])
    xt, sx, yt, sy = on(device, *found)
    yield "grouped_gemm of float8 along K", (tkq.grouped_gemm(xt, yt.t(), offsets, scale_a=sx, scale_b=sy.t()),)


def states(device):
    """Linear attention: two heads of v to one of q, gates of tokens, states; and one warpgroup of the state."""
    import tkq

    for K, V, tokens in ((64, 128, 200), (64, 64, 65)):
        q, k, v, g, initial, do, dstate = on(
            device, *(randn(i, 1, tokens, 2, K, grad=True) for i in (0, 1)), randn(2, 1, tokens, 4, V, grad=True),
            (-randn(3, 1, tokens, 4, dtype=torch.float32).abs()).requires_grad_(),
            randn(4, 1, 4, K, V, dtype=torch.float32, grad=True), randn(5, 1, tokens, 4, V),
            randn(6, 1, 4, K, V, dtype=torch.float32))
        o, state = tkq.linear_attn(q, k, v, g, initial_state=initial, output_final_state=True)
        yield f"linear_attn {K} x {V}", (o, state, *grad((o, state), (q, k, v, g, initial), (do, dstate)))
        q, k, v, g, initial, beta = given = [
            x.detach().requires_grad_() for x in (q, k / 8, v, g, initial, g.sigmoid())]
        o, state = tkq.gated_delta_rule(q, k, v, g, beta, None, initial, True)
        yield f"gated_delta_rule {K} x {V}", (o, state, *grad((o, state), given, (do, dstate)))
        x, dt, B, C, states, A, D, bias = (t.detach().requires_grad_() for t in (
            v, beta, k, q, initial.mT, -g[0, 0].sigmoid(), initial[0, :, 0], g[0, 1]))
        y, state = tkq.mamba2_ssd(x, dt, A, B, C, D, do, bias, states, True, return_final_states=True)
        yield f"mamba2_ssd {K} x {V}", (y, state, *grad((y, state), (x, dt, A, B, C, D, bias, states),
                                                        (do, dstate.mT)))
        gates = (g.detach()[..., None] * torch.linspace(0, 2, K, device=device)).requires_grad_()
        given = q, k, v, gates, beta, initial
        o, state = tkq.gated_delta_rule(q, k, v, gates, beta, None, initial, True)
        yield f"gated_delta_rule {K} x {V}, columns", (o, state, *grad((o, state), given, (do, dstate)))
        o = tkq.gated_delta_rule(q, k, v, gates, beta, A_log=g[0, 0].detach(), use_gate_in_kernel=True)
        yield f"gated_delta_rule {K} x {V}, gates of a layer", (o, *grad((o,), (q, gates), (do,)))
        o = tkq.linear_attn(q, k, v, gates)
        yield f"linear_attn {K} x {V}, columns", (o, *grad((o,), (q, k, v, gates), (do,)))
    v, do = (torch.cat((x.detach(), x.detach(), x.detach()), -1) for x in (v, do))
    o = tkq.linear_attn(q, k, v.requires_grad_(), gates)  # V of 192: its gates' gradients take a launch of their own
    yield "linear_attn of wide values, columns", (o, *grad((o,), (q, k, v, gates), (do,)))
    q, k, v, do = on(device, *(randn(i, 1, 130, 2, 16, grad=True) for i in (0, 1)), randn(2, 1, 130, 4, 64, grad=True),
                     randn(3, 1, 130, 4, 64))
    o = tkq.based(q, k, v)
    yield "based", (o, *grad((o,), (q, k, v), (do,)))
    with torch.no_grad():
        yield "based in segments", (tkq.based(*on(device, *(randn(i, 1, 1100, 1, n) for i, n in enumerate(
            (16, 16, 64))))),)
    from tests.helpers.sanitizer.convolution_calls import convolutions, scans  # which take what stands here
    from tests.helpers.sanitizer.packed_calls import packed_states

    yield from packed_states(device)
    yield from windows_and_states(device)
    yield from convolutions(device)
    yield from scans(device)


def windows_and_states(device):
    """Hedgehog's attention: features beside what they are made of, and in its place."""
    import tkq

    for D, F, tokens in ((128, 64, 260), (64, 64, 65), (64, 32, 200)):
        given = on(device, *(randn(i, 1, tokens, 2, D, grad=True) for i in range(3)),
                   *((randn(i, 2, D, F) / 8).requires_grad_() for i in (3, 4)),
                   *(randn(i, 2, dtype=torch.float32).sigmoid().requires_grad_() for i in (5, 6)))
        o = tkq.hedgehog(*given)
        yield f"hedgehog {D} x {F}", (o, *grad((o,), given, (torch.ones_like(o),)))


def steps(device):
    """One token and several, states with either dimension contiguous and neither, rows by indices; a state space."""
    import tkq

    for T, K, V, kind in ((1, 128, 64, "v"), (3, 64, 48, "k"), (2, 48, 32, "any")):
        q, k, v, g, pool, rows = on(
            device, randn(0, 3, T, 2, K), randn(1, 3, T, 2, K) / 8, randn(2, 3, T, 4, V),
            -randn(3, 3, T, 4, dtype=torch.float32).abs(), randn(4, 5, 4, K, V, dtype=torch.float32),
            torch.tensor([4, -1, 0]))
        pool = {"v": pool, "k": pool.mT.contiguous().mT, "any": torch.stack((pool, pool), -1)[..., 0]}[kind]
        o = tkq.linear_attn_step(q, k, v, g, pool, None, rows)
        yield f"linear_attn_step {K} x {V}", (o.clone(), pool.clone())
        o = tkq.gated_delta_rule_step(q, k, v, g, g.sigmoid(), pool, None, True, rows)
        yield f"gated_delta_rule_step {K} x {V}", (o, pool)
    x, dt, A, B, C, pool, rows = on(
        device, randn(5, 3, 4, 64), randn(6, 3, 4), -randn(7, 4, dtype=torch.float32).abs(), randn(8, 3, 2, 128) / 8,
        randn(9, 3, 2, 128) / 8, randn(10, 5, 4, 64, 128, dtype=torch.float32), torch.tensor([2, 0, -1]))
    y = tkq.ssd_step(pool, x, dt, A, B, C, A, x, A, True, rows)
    yield "ssd_step", (y, pool)


def caches(device):
    from tests.helpers.sanitizer.cache_calls import attended  # which takes what stands here

    yield from attended(device)


FAMILIES = {f.__name__: f for f in (norms, residents, heads, softmax, cross_entropy, linear, quant, rope, gated, gemm,
                                    fp8, quantise, grouped, states, steps, caches)}


def apart(a, b) -> float:
    """The largest difference, of the largest value."""
    a, b = (t.detach().cpu().double() for t in (a, b))
    return ((a - b).abs().max() / b.abs().max().clamp_min(1e-30)).item()


def run(names, families) -> int:
    """How many cases were bad."""
    bad = 0
    for name in names:
        cases = families[name]("cuda")
        for right_name, right in families[name]("cpu"):
            try:
                _, found = next(cases)
                torch.cuda.synchronize()
                worst = max(apart(a, b) for a, b in zip(found, right, strict=True))
                fine, says = worst <= LIMITS.get(name, LIMIT), f"{worst:.1e} apart"
            except Exception as problem:  # the other families are still worth a run
                fine, says = False, f"{type(problem).__name__}: {str(problem)[:200]}"
            bad += not fine
            print(f"{'ok ' if fine else 'BAD'} {name}: {right_name}: {says}", flush=True)
    return bad


def main(families) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("families", nargs="*", help=f"of {', '.join(families)}; all unless named")
    parser.add_argument("--list", action="store_true", help="print their names")
    options = parser.parse_args()
    if options.list:
        print("\n".join(families))
        return 0
    bad = run(options.families or families, families)
    for recipe in build._functions:  # for looking up a report's addresses
        print("kernels:", build.entry_of(recipe).path)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(FAMILIES))
