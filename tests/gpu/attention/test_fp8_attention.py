"""flash_attn_fp8 on a GPU against float64 of what its numbers mean, beside PyTorch with P rounded to e4m3."""
import itertools
import math

import pytest
import torch

import tkq
from tests.helpers.attention.fp8 import F8, SCORES, call, compare, make, quantised
from tests.helpers.sanitizer.nan_fill import poisoned
from tkq.attention.fp8 import launch
from tkq.attention.fp8.check import Call
from tkq.attention.fp8.config import HAND_OVERS, Fp8Config
from tkq.reference import attention_fp8 as reference
from tkq.tile.float8 import operand_column

MODES = ("two_level", "fast")
DIMS = (64, 128, 256)
SIZES = ((128, 128), (64, 64), (1, 1), (1, 777), (113, 203), (300, 100), (65, 1999), (2000, 65), (1024, 1024),
         (127, 129), (129, 1), (300, 2500), (63, 63), (65, 65), (799, 3), (640, 640))
NAN = 0x7F


@pytest.mark.parametrize("accumulate", MODES)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.sampled(when=lambda accumulate, dim, causal: accumulate == "two_level" or (causal and dim == 64))
def test_sizes(accumulate, dim, causal):
    for rows, keys in SIZES:
        compare(make(2, rows, keys, 4, 2, dim), f"{rows} x {keys}", accumulate=accumulate, causal=causal)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("causal", (False, True))
def test_long_sequences(dim, causal):
    for n, accumulate in ((4097, "fast"), (8300, "two_level")):
        compare(make(1, n, n, 2, 1, dim), f"{n} rows", accumulate=accumulate, causal=causal)


@pytest.mark.parametrize("dim", (64, 256))
def test_heads(dim):
    """More tasks than blocks, too."""
    for batch, heads, kv_heads in ((1, 1, 1), (3, 6, 3), (2, 8, 1), (2, 40, 8), (7, 13, 1)):
        compare(make(batch, 333, 417, heads, kv_heads, dim), f"B{batch} H{heads}/{kv_heads}", causal=heads > 8)


@pytest.mark.parametrize("dim", (32, 96, 160, 192, 224))
@pytest.mark.parametrize("accumulate", MODES)
@pytest.mark.sampled(when=lambda dim, accumulate: (accumulate == "fast") == (dim in (96, 160)))
def test_head_dims(dim, accumulate):
    """Narrower than their tiles."""
    compare(make(2, 200, 333, 4, 2, dim), f"{dim}", accumulate=accumulate, causal=True)


@pytest.mark.parametrize("dim", (64, 128, 256))
@pytest.mark.parametrize("accumulate", MODES)
@pytest.mark.sampled(when=lambda dim, accumulate: (accumulate, dim) == ("two_level", 128))
def test_windows(dim, accumulate):
    given = make(2, 700, 900, 4, 2, dim)
    for left, right in ((0, 0), (200, 100), (600, 0), (5, 600)):
        compare(given, "window", accumulate=accumulate, left=left, right=right)


@pytest.mark.parametrize("dim", (64, 128, 256))
@pytest.mark.parametrize("accumulate", MODES)
@pytest.mark.sampled(when=lambda dim, accumulate: dim == 64 and accumulate == "two_level")
def test_windows_without_an_end(dim, accumulate):
    given = make(2, 700, 900, 4, 2, dim)
    for left, right in ((100, -1), (-1, 30), (-1, 0)):
        compare(given, "window", accumulate=accumulate, left=left, right=right)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("causal", (False, True))
def test_each_task_has_its_own_largest_scores(dim, causal):
    """A block has several tasks, and the next one's factors are others."""
    given = make(8, 256, 256, 32, 8, dim)
    apart = torch.linspace(0.2, 5, 64, device="cuda")[torch.randperm(64, device="cuda")].view(8, 8)
    compare(given | dict(q_descale=given["q_descale"] * apart, v_descale=given["v_descale"] * apart.flip(0)), "tasks",
            causal=causal)


@pytest.mark.parametrize("dim", (pytest.param(64, marks=pytest.mark.slow), 256))
def test_a_window_of_other_plans(dim):
    compare(make(2, 700, 900, 4, 2, dim), "window", left=200, right=100)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("causal", (False, True))
def test_hard_data(dim, causal):
    g = torch.Generator("cuda").manual_seed(dim)
    q, k, v = (torch.randn(2, 517, 4, dim, device="cuda", generator=g) for _ in range(3))
    cases = {"large scores": (q * 20, k, v), "large values with a mean": (q, k, v * 1000 + 500)}
    peaked, dominating, twice = k.clone(), k.clone(), k.clone()
    peaked[:, ::50] = q[:, ::50] * 4
    dominating[:, 0], twice[:, 1::2] = 30 * q.mean(1), twice[:, :-1:2]
    cases |= {"peaked rows": (q, peaked, v), "one dominating key": (q, dominating, v), "each key twice": (q, twice, v),
              "equal keys": (q, k[:, :1].expand(-1, 517, -1, -1), v), "zero queries": (torch.zeros_like(q), k, v),
              "all scores far below zero": (-q.abs(), k.abs() * 8, v), "zero values": (q, k, torch.zeros_like(v)),
              "constant values": (q, k, torch.ones_like(v))}
    for what, tensors in cases.items():
        for accumulate in MODES:
            compare(quantised(*tensors), what, accumulate=accumulate, causal=causal, ulps=2, scores=SCORES)
    for scale in (1.5, 1e-4):
        compare(quantised(q, k, v), "scale", causal=causal, softmax_scale=scale)


@pytest.mark.parametrize("causal", (False, True))
def test_a_maximum_that_moves_in_every_block(causal):
    """Scores that grow, and that fall, along the keys, slowly and fast: whether O is rescaled, warp by warp.

    A score is one product, and exact: of sums as large as these the tensor cores cut off more than the weights of keys
    side by side may change."""
    up = torch.linspace(0, 1, 1500, device="cuda")[None, :, None]
    for dim, size, sign, ramp, accumulate in itertools.product(DIMS, (0.05, 1.0, 20.0), (1, -1), (up, 1 - up), MODES):
        q, k = torch.zeros(1, 200, 2, dim, device="cuda"), torch.zeros(1, 1500, 2, dim, device="cuda")
        q[..., 0], k[..., 0] = torch.rand(1, 200, 2, device="cuda") + 0.5, dim * sign * size * ramp
        compare(quantised(q, k, torch.randn(1, 1500, 2, dim, device="cuda")), f"{size * sign}", causal=causal, ulps=2,
                accumulate=accumulate)


@pytest.mark.parametrize("dim", (64, 128))
@pytest.mark.parametrize("causal", (pytest.param(False, marks=pytest.mark.slow), True))
def test_layouts(dim, causal):
    packed = make(2, 333, 333, 12, 12, dim)
    q, k, v = packed["q"].view(torch.uint8).clone().split(4, 2)
    # numbers of up to 448, without descales
    run = lambda what, q, k, v: compare(dict(q=q, k=k, v=v), what, causal=causal, softmax_scale=2e-5)
    of = lambda *xs: [x.view(F8) for x in xs]
    run("packed qkv", *of(q, k, v))
    given = make(2, 333, 333, 4, 4, dim)
    q, k, v = (given[n].view(torch.uint8) for n in "qkv")
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    run("(B, H, S, D) in memory", *of(*heads_first))
    run("stride 0 over heads", *of(q, *(x[:, :, :1].expand(-1, -1, 4, -1) for x in (k, v))))
    run("stride 0 over the batch", *of(q, *(x[:1].expand(2, -1, -1, -1) for x in (k, v))))
    run("every second row", *of(q[:, ::3], k[:, ::2], v[:, ::2]))


@pytest.mark.parametrize("keys", (1, 15, 16, 129, 512, 1000))
def test_values_whose_keys_are_contiguous(keys):
    given = make(2, 200, keys, 4, 2, 128)
    room = torch.full((2, 2, 128, -(-keys // 16) * 16 + 16), NAN, dtype=torch.uint8, device="cuda")
    room[..., :keys] = given["v"].view(torch.uint8).permute(0, 2, 3, 1)
    v = torch.as_strided(room.view(F8), given["v"].shape, room.permute(0, 3, 1, 2).stride())
    o, lse = compare(given | dict(v=v), f"{keys} keys")
    other, other_lse = call(given)
    assert torch.equal(o, other) and torch.equal(lse, other_lse)


@pytest.mark.parametrize("keys_contiguous", (False, True))
def test_values_are_transposed(keys_contiguous):
    """Into the order of the operand, with zeros behind."""
    for B, keys, H, D in ((1, 1, 1, 32), (2, 130, 3, 64), (1, 5000, 8, 128), (3, 255, 1, 256), (2, 15, 1, 96)):
        x = torch.randint(0, 256, (B, keys, H, D), dtype=torch.uint8, device="cuda")
        v = x
        if keys_contiguous:
            room = torch.zeros(B, H, D, -(-keys // 16) * 16, dtype=torch.uint8, device="cuda")
            room[..., :keys] = x.permute(0, 2, 3, 1)
            v = room.permute(0, 3, 1, 2)[:, :keys]
        v = torch.as_strided(v.permute(0, 2, 3, 1).view(F8) if keys_contiguous else v.view(F8), v.shape, v.stride())
        torch.full((B * H * D * (keys + 128),), NAN, dtype=torch.uint8, device="cuda")  # what the workspace may reuse
        found = launch.transposed(Call(v, v, v)).view(torch.uint8)
        wanted = torch.zeros(B, found.shape[3], H, D, dtype=torch.uint8, device="cuda")
        wanted[:, :keys] = x
        order = [16 * (i // 16) + operand_column(i % 16) for i in range(found.shape[3])]
        assert torch.equal(found, wanted[:, order].permute(0, 2, 3, 1)), (B, keys, H, D)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("causal", (False, True))
def test_nothing_outside_is_read(dim, causal):
    """NaN lies before and behind every tensor."""
    given = make(2, 300, 333, 4, 2, dim)
    inside = {}
    for name, x in given.items():
        if name in "qkv":
            room = torch.full((2, x.shape[1] + 130, *x.shape[2:]), NAN, device="cuda", dtype=torch.uint8)
            room[:, 30:30 + x.shape[1]] = x.view(torch.uint8)
            inside[name] = room.view(F8)[:, 30:30 + x.shape[1]]
        else:
            room = torch.full((4, 6), math.nan, device="cuda")
            room[1:3, 2:4] = x
            inside[name] = room[1:3, 2:4]
    o, lse = compare(inside, "inside NaN", causal=causal)
    plain = call(given, causal=causal)
    assert torch.equal(o, plain[0]) and torch.equal(lse, plain[1])


@pytest.mark.parametrize("names", ("", "q", "k", "v", "qk", "qv", "kv", "qkv"))
@pytest.mark.sampled(when=lambda names: names in ("", "v", "qkv"))
def test_descales(names):
    """Those that are given, and only those; of any strides."""
    given = make(2, 200, 300, 6, 3, 64)
    kept = {n: x for n, x in given.items() if n in "qkv" or n[0] in names}
    scale = {0: 2e-5, 1: 2e-3, 2: None}[len({"q", "k"} & set(names))]  # scores of a size that any has
    compare(kept, f"descales {names}", softmax_scale=scale)
    if names:
        one = {n: x[:1, :1].expand(2, 3) if n not in "qkv" else x for n, x in kept.items()}
        compare(one, "broadcast descales", softmax_scale=scale)
        turned = {n: x if n in "qkv" else x.T.contiguous().T for n, x in kept.items()}
        assert torch.equal(call(turned, softmax_scale=scale)[0], call(kept, softmax_scale=scale)[0])


@pytest.mark.parametrize("accumulate", MODES)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.sampled(when=lambda dim, accumulate: (accumulate, dim) == ("two_level", 128))
def test_results(dim, accumulate):
    """float16 results, with and without lse."""
    given = make(1, 300, 400, 4, 4, dim)
    o, _ = compare(given, "fp16", accumulate=accumulate, out_dtype=torch.float16)
    alone, none = compare(given, "fp16 alone", accumulate=accumulate, out_dtype=torch.float16, return_lse=False)
    assert none is None and o.dtype == alone.dtype == torch.float16


def test_numbers_that_are_none():
    """NaN in a query is in its row alone, in a key in the rows that see it, in a value in its column."""
    given = make(1, 300, 300, 2, 2, 128)
    bytes_ = {n: given[n].view(torch.uint8).clone() for n in "qkv"}
    bytes_["q"][0, 7, 0, 3] = bytes_["v"][0, 200, 1, 5] = bytes_["k"][0, 290, 0, 1] = NAN
    wrong = {n: x.view(F8) for n, x in bytes_.items()}
    for accumulate in MODES:
        o, lse = call(given | dict(q=wrong["q"], k=wrong["k"]), causal=True, accumulate=accumulate)
        wanted = torch.zeros_like(o, dtype=torch.bool)
        wanted[0, 7, 0] = wanted[0, 290:, 0] = True
        assert torch.equal(o.isnan(), wanted)
        assert lse[0, 0, 7].isnan() and lse[0, 0, 290:].isnan().all() and not lse[0, 1].isnan().any()
        o, lse = call(given | dict(v=wrong["v"]), accumulate=accumulate)
        assert o[0, :, 1, 5].isnan().all() and o.isnan().sum() == 300 and not lse.isnan().any()


@pytest.mark.parametrize("config", [
    Fp8Config(ping_pong=False), Fp8Config(schedule="static"), Fp8Config(schedule="single"), Fp8Config(stages=3),
    Fp8Config(kv=96), Fp8Config(kv=64, q_stages=1), Fp8Config(overlap=False, ping_pong=False),
    Fp8Config(overlap=False, ping_pong=False, parts=2), Fp8Config(consumers=1),
    *(Fp8Config(hand_over=point) for point in HAND_OVERS)], ids=str)
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.slow
def test_configurations(config, causal):
    """Every way to build the kernel is right, whatever the plan uses."""
    for dim in (64, 128):
        for rows, keys in ((129, 700), (641, 641)):
            compare(make(2, rows, keys, 4, 2, dim), str(config), config=config, causal=causal)
        compare(make(3, 300, 500, 40, 8, dim), f"many tasks {config}", config=config, causal=causal)


@pytest.mark.parametrize("dim, config", [(64, Fp8Config(kv=192)), (64, Fp8Config(consumers=3, stages=3)),
                                         (128, Fp8Config(kv=160)), (128, Fp8Config(kv=224))], ids=str)
@pytest.mark.sampled(when=lambda config: config.kv == 192)
def test_configurations_of_fast_sums(dim, config):
    compare(make(2, 641, 641, 4, 2, dim), str(config), config=config, causal=True, accumulate="fast")


@pytest.mark.parametrize("accumulate", MODES)
@pytest.mark.parametrize("dim", DIMS)
def test_the_same_bits_in_every_run(accumulate, dim):
    """And a sequence's results do not depend on the others of the batch."""
    given = make(3, 1000, 1000, 8, 2, dim)
    first = call(given, causal=True, accumulate=accumulate)
    for _ in range(10):
        again = call(given, causal=True, accumulate=accumulate)
        assert torch.equal(again[0], first[0]) and torch.equal(again[1], first[1])
    alone = call({n: x[1:2] for n, x in given.items()}, causal=True, accumulate=accumulate)
    assert torch.equal(alone[0], first[0][1:2]) and torch.equal(alone[1], first[1][1:2])


def test_a_graph():
    given = make(2, 500, 700, 4, 2, 128)
    tkq.flash_attn_fp8(**given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = tkq.flash_attn_fp8(**given)
    for seed in (1, 2):
        for name, x in make(2, 500, 700, 4, 2, 128, seed).items():
            given[name].copy_(x)
        graph.replay()
        assert torch.equal(o, tkq.flash_attn_fp8(**given))


@pytest.mark.slow  # test_every_op.py compiles each function every day
def test_torch_compile():
    given = make(2, 100, 130, 4, 2, 64)
    compiled = torch.compile(lambda **x: tkq.flash_attn_fp8(**x, causal=True), fullgraph=True)
    assert torch.equal(compiled(**given), tkq.flash_attn_fp8(**given, causal=True))


def _relative(o, truth):
    return ((o.double() - truth).norm() / truth.norm()).item()


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.sampled(when=lambda dim: dim == 128)
def test_values_of_mean_one(dim):
    """Sums over 131072 keys of values that do not cancel each other out: two levels are far more exact. The bound is
    P's rounding, which a long sum averages, and what one block's product cuts off."""
    g = torch.Generator("cuda").manual_seed(0)
    new = lambda rows: torch.randn(1, rows, 1, dim, device="cuda", generator=g)
    given = quantised(new(64), new(131072), new(131072) * 0.25 + 1)
    truth, _ = reference.flash_attn_fp8(**given, out_dtype=torch.float64)
    two, fast = (_relative(call(given, accumulate=mode, out_dtype=torch.float16)[0], truth) for mode in MODES)
    assert two < 2e-3, (two, fast)
    assert fast > 4 * two, (two, fast)


@pytest.mark.parametrize("dim", DIMS)
def test_a_needle(dim):
    """One key of 131072 that a query looks for, among others of mean one: its value has about half of the weight."""
    keys, at = 131072, torch.tensor([5, 1000, 65000, 65537, 131071], device="cuda")
    g = torch.Generator("cuda").manual_seed(1)
    k = torch.randn(1, keys, 1, dim, device="cuda", generator=g)
    v = torch.randn(1, keys, 1, dim, device="cuda", generator=g) * 0.25 + 1
    q = k[:, at] * (math.log(keys) / (k[:, at].square().sum(-1, keepdim=True) * dim ** -0.5))
    v[:, at] = 4 * torch.randn(1, len(at), 1, dim, device="cuda", generator=g)
    given = quantised(q, k, v)
    compare(given, "needle", ulps=2, scores=SCORES)  # the score on which half of the weight depends is cut off
    truth, _ = reference.flash_attn_fp8(**given, out_dtype=torch.float64)
    assert _relative(call(given)[0], truth) < 0.02


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
def test_quantised(dtype):
    """As the reference: scales to the last bits, elements but for ties; NaN and zeros; strides; again the same bits."""
    for B, rows, keys, heads, kv_heads, dim in ((2, 300, 517, 8, 2, 128), (1, 1, 1, 1, 1, 8), (3, 33, 64, 6, 6, 96),
                                                (1, 0, 5, 2, 1, 64), (1, 4000, 9, 32, 1, 64)):
        q, k, v = (torch.randn(B, s, h, dim + pad, device="cuda").to(dtype)[..., :dim]
                   for s, h, pad in ((rows, heads, 8), (keys, kv_heads, 0), (keys, kv_heads, 3)))
        if keys > 5:
            k[0, :, 0], v[-1, 3, 0, 1] = 0, math.nan
        with poisoned():
            found = tkq.quantize_qkv(q, k, v)
            again = tkq.quantize_qkv(q, k, v)
        wanted = reference.quantize_qkv(q, k, v)
        for x, y, name in zip(found[3:], wanted[3:], "qkv", strict=True):
            torch.testing.assert_close(x, y, rtol=1e-6, atol=0, equal_nan=True, msg=f"descale of {name}")
        for x, y, z in zip(found[:3], wanted[:3], again[:3], strict=True):
            assert torch.equal(x.view(torch.uint8), z.view(torch.uint8)) and torch.equal(x.isnan(), y.isnan())
            off = (x.float() - y.float()).nan_to_num(0.0).abs()
            assert (off <= 2 ** -3 * y.float().nan_to_num(0.0).abs() + 2 ** -9).all()
            assert off.count_nonzero() <= 1 + off.numel() // 1000
    compare(dict(zip(("q", "k", "v", "q_descale", "k_descale", "v_descale"), tkq.quantize_qkv(
        *(torch.randn(2, 300, h, 128, device="cuda", dtype=dtype) for h in (4, 2, 2))))), "quantised")


@pytest.mark.parametrize("rotate, smooth_k, tables", [(True, True, True), *(
    pytest.param(*each, marks=pytest.mark.slow) for each in (
        (True, False, False), (False, True, False), (False, False, True)))])
def test_quantised_with_options(rotate, smooth_k, tables):
    """As the reference, but for ties. More tokens than one sum of k has; a mean far larger than what is left, and a
    column that is; NaN in one head alone."""
    for dtype, dim, tokens, heads, kv_heads in ((torch.bfloat16, 128, 517, 8, 2), (torch.float32, 64, 1, 1, 1),
                                                (torch.float16, 256, 300, 6, 6)):
        q, k, v = (torch.randn(2, tokens, h, dim + 8, device="cuda") for h in (heads, kv_heads, kv_heads))
        k += 8 * torch.randn(2, 1, kv_heads, dim + 8, device="cuda")
        q[..., 5] *= 30
        q, k, v = (x.to(dtype)[..., :dim] for x in (q, k, v))
        if kv_heads > 1:
            k[1, 3, 0, 1] = math.nan
        angles = torch.randn(tokens + 3, dim // 2, device="cuda")
        options = dict(rotate=rotate, smooth_k=smooth_k)
        if tables:
            options |= dict(cos=angles.cos(), sin=angles.sin())
        with poisoned():
            found = tkq.quantize_qkv(q, k, v, **options)
            again = tkq.quantize_qkv(q, k, v, **options)
        wanted = reference.quantize_qkv(q, k, v, **options)
        for x, y, name in zip(found[3:], wanted[3:], "qkv", strict=True):
            torch.testing.assert_close(x, y, rtol=3e-5, atol=1e-7, equal_nan=True, msg=f"descale of {name}, D {dim}")
        for x, y, z in zip(found[:3], wanted[:3], again[:3], strict=True):
            assert torch.equal(x.view(torch.uint8), z.view(torch.uint8)) and torch.equal(x.isnan(), y.isnan())
            if smooth_k and tokens == 1:  # what is left of k is 0, or what was rounded
                continue
            off = (x.float() - y.float()).nan_to_num(0.0).abs()
            assert (off <= 2 ** -3 * y.float().nan_to_num(0.0).abs() + 2 ** -9).all()
            # a mean of float32, of which little is left, is a thousandth of a unit beside the exact one
            assert off.count_nonzero() <= 1 + off.numel() // (100 if smooth_k else 1000)


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("accumulate", MODES)
@pytest.mark.sampled(each_value=True)
def test_zeros_as_they_are_quantised(causal, accumulate):
    """The product of their scales is less than float32 has: all keys that a row sees weigh the same."""
    q = torch.zeros(1, 130, 2, 64, device="cuda", dtype=torch.bfloat16)
    v = torch.randn(1, 130, 1, 64, device="cuda").bfloat16()
    with poisoned():
        *qkv, a, b, c = tkq.quantize_qkv(q, q[:, :, :1].contiguous(), v)
        o = tkq.flash_attn_fp8(*qkv, q_descale=a, k_descale=b, v_descale=c, causal=causal, accumulate=accumulate)
    exact = (qkv[2].double() * c[..., None].double()[:, None])[:, :, 0]
    seen = torch.ones(130, 130, device="cuda", dtype=torch.double).tril_() if causal else torch.ones(
        130, 130, device="cuda", dtype=torch.double)
    want = (seen / seen.sum(1, keepdim=True)) @ exact
    for head in range(2):
        torch.testing.assert_close(o[:, :, head].double(), want, rtol=0.05, atol=0.05)


def test_more_sequences_and_heads_than_a_grid_is_wide():
    q = torch.randn(8193, 2, 8, 64, device="cuda", dtype=torch.bfloat16)
    found, wanted = tkq.quantize_qkv(q, q, q), reference.quantize_qkv(*[q[-1:].cpu()] * 3)
    for mine, want in zip(found[:3], wanted[:3]):
        assert torch.equal(mine[-1:].view(torch.uint8).cpu(), want.view(torch.uint8))
