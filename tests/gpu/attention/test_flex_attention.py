"""tkq.flex_attention on the GPU against float64: the gallery, block masks of all kinds, captured values, empty rows."""
import math

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import tkq
from tests.helpers.attention import flex_gallery as gallery
from tests.helpers.sanitizer.nan_fill import poisoned

B, H = 2, 4
BF16, FP16 = torch.bfloat16, torch.float16
# a kernel each, of which others have all parts
SELDOM = "alibi", "dilated", "natten", "prefix_document", "prefix_lm", "standalone_sparse", "t5_bias"


@pytest.fixture(autouse=True)
def _poisoned():
    with poisoned():
        yield


def make(Sq, Sk, D=128, dtype=BF16, heads=(B, H, H), seed=0, scale=1.0):
    """heads: (batch, query's, key's)."""
    g, (batch, h, h_kv) = torch.Generator("cuda").manual_seed(seed + Sq * 7 + Sk), heads
    new = lambda h, s: (torch.randn(batch, h, s, D, device="cuda", generator=g) * scale).to(dtype)
    return new(h, Sq), new(h_kv, Sk), new(h_kv, Sk)


def mask_of(mask_mod, Sq, Sk, batch=B, heads=H, size=128):
    return None if mask_mod is None else create_block_mask(mask_mod, batch, heads, Sq, Sk, "cuda", size)


def check(q, k, v, score_mod=None, mask_mod=None, block_mask=None, seen=None, what="", **options):
    """Of one call: o and lse against float64. seen: where the mask does not say it."""
    (batch, heads, Sq, _), Sk = q.shape, k.shape[2]
    if block_mask is None:
        block_mask = mask_of(mask_mod, Sq, Sk, batch, heads)
    options = {"enable_gqa": heads != k.shape[1], **options}
    o, lse = tkq.flex_attention(q, k, v, score_mod, block_mask, return_lse=True, **options)
    seen = gallery.visible(mask_mod, batch, heads, Sq, Sk, "cuda") if seen is None else seen
    gallery.judge((o, lse), (q, k, v), score_mod, seen, what, options.get("scale"))
    return o, lse


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SELDOM))
                                  for name in gallery.gallery(1, 1, 128, "cpu")])
def test_gallery(name):
    S = 576
    score_mod, mask_mod = gallery.gallery(B, H, S, "cuda", torch.Generator("cuda").manual_seed(1))[name]
    check(*make(S, S), score_mod, mask_mod, what=name)


@pytest.mark.parametrize("name", ["whole", "other", pytest.param("smooth", marks=pytest.mark.slow)])
def test_operations(name):
    S, g = 300, torch.Generator("cuda").manual_seed(5)
    table, flags = torch.randn(7, S, device="cuda", generator=g), torch.rand(S, device="cuda", generator=g) < 0.3
    small = torch.randint(0, 5, (S,), device="cuda", generator=g, dtype=torch.int8)
    check(*make(S, S), gallery.operations(table, flags, small)[name], what=name)


@pytest.mark.parametrize("Sq, Sk", [(1, 1), (3, 200), (200, 3), (129, 640), (1000, 1000)])
def test_lengths(Sq, Sk):
    """The last queries and keys fill no tile; also where nothing is masked."""
    check(*make(Sq, Sk), mask_mod=gallery.causal)
    check(*make(Sq, Sk, seed=1))


@pytest.mark.parametrize("D, dtype", [(64, BF16), (128, FP16), (256, BF16),
                                      pytest.param(192, FP16, marks=pytest.mark.slow)])
def test_dtypes_and_dims(D, dtype):
    """Of wide heads a listed block is two tiles of keys, and the last one ends inside the second."""
    check(*make(700, 700, D, dtype), mask_mod=gallery.causal)


@pytest.mark.parametrize("D, Dv, tile", [(96, 72, 128), (200, 136, 256)])
def test_odd_dims(D, Dv, tile):
    """Narrower than a tile, values of others than keys."""
    q, k, v = make(300, 300, tile)
    check(q[..., :D], k[..., :D], v[..., :Dv], mask_mod=gallery.causal)


@pytest.mark.parametrize("size", [
    (64, 64), (128, 256), *(pytest.param(size, marks=pytest.mark.slow) for size in ((256, 128), (384, 192)))])
def test_block_sizes(size):
    mask_mod = gallery.prefix_lm(torch.tensor([33, 300], device="cuda", dtype=torch.int32))
    check(*make(700, 650), mask_mod=mask_mod, block_mask=mask_of(mask_mod, 700, 650, size=size))


def test_grouped_heads_and_strides():
    """(B, S, H, D) in memory, slices of a packed tensor; o lies as q does."""
    g = torch.Generator("cuda").manual_seed(0)
    packed = torch.randn(B, 500, 8 + 2 + 2, 128, device="cuda", generator=g).to(BF16)
    q, k, v = (x.transpose(1, 2) for x in packed.split((8, 2, 2), 2))
    slopes = torch.rand(8, device="cuda", generator=g)
    o, _ = check(q, k, v, gallery.alibi(slopes), gallery.causal)
    assert o.transpose(1, 2).is_contiguous()
    odd = torch.randn(3, B, 4, 300, 131, device="cuda", generator=g).to(BF16)[..., 1:129]  # copied
    check(*odd, mask_mod=gallery.causal)


def test_broadcast_masks():
    """One list for all heads, or all batches; lists of some heads alone."""
    lengths = torch.tensor([100, 400], device="cuda", dtype=torch.int32)
    for batch, heads in ((None, None), (B, None), (None, H)):
        mask_mod = {(None, None): gallery.causal, (B, None): gallery.prefix_lm(lengths),
                    (None, H): lambda b, h, q, kv: (q - kv).abs() < 64 * (h + 1)}[batch, heads]
        check(*make(500, 500), mask_mod=mask_mod, block_mask=mask_of(mask_mod, 500, 500, batch, heads))


def test_empty_rows():
    """Rows, tiles and whole heads that see nothing: 0 and -inf, whatever is in V."""
    def mask_mod(b, h, q, kv):
        return (q >= kv) & (q > 150) & (h != 1) & (kv > 140)

    q, k, v = make(600, 600)
    o, lse = check(q, k, v, mask_mod=mask_mod)
    assert (o[:, 1] == 0).all() and (lse[:, 1] == -math.inf).all()
    v[:, :, :141] = math.nan  # behind the mask all over, some of it in blocks that rows of others see
    hidden = tkq.flex_attention(q, k, v, None, mask_of(mask_mod, 600, 600))
    assert (hidden[:, :, :151] == 0).all() and (hidden[:, 1] == 0).all()


def test_rows_of_no_block():
    """Nothing is listed for some rows, or for any: they see nothing, whatever the mask says; also of blocks of several
    tiles of keys."""
    q, k, v = make(512, 512)
    for some, keys in ((1, 128), (0, 128), (1, 256)):
        num = torch.tensor([[[some, 0, some, 0]]], device="cuda", dtype=torch.int32)
        indices = torch.zeros(1, 1, 4, 512 // keys, device="cuda", dtype=torch.int32)
        mask = BlockMask.from_kv_blocks(num, indices, torch.zeros_like(num), indices, (128, keys), gallery.causal,
                                        (512, 512))
        o, lse = (x.unflatten(2, (4, 128)) for x in tkq.flex_attention(q, k, v, None, mask, return_lse=True))
        nothing = [1, 3] if some else [0, 1, 2, 3]
        assert (o[:, :, nothing] == 0).all() and (lse[:, :, nothing] == -math.inf).all()
        assert not some or lse[:, :, [0, 2]].isfinite().all()


def test_full_blocks_are_not_masked():
    """A block that is listed as full counts all, whatever the mask says; what is not listed counts nothing."""
    q, k, v = make(512, 512)
    num = torch.tensor([[[1, 0, 2, 1]]], device="cuda", dtype=torch.int32)
    indices = torch.tensor([[[[1, 0, 0, 0], [0, 0, 0, 0], [3, 0, 0, 0], [2, 0, 0, 0]]]], device="cuda",
                           dtype=torch.int32)
    full_num, full_indices = num.flip(2).contiguous(), torch.tensor(
        [[[[3, 0, 0, 0], [0, 2, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]]]], device="cuda", dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(num, indices, full_num, full_indices, 128, gallery.causal, (512, 512))
    full = torch.zeros(4, 4, dtype=torch.bool, device="cuda")
    full[[0, 1, 1, 3], [3, 0, 2, 1]] = True
    partial = torch.zeros_like(full)
    partial[[0, 2, 2, 3], [1, 3, 0, 2]] = True
    wide = lambda x: x.repeat_interleave(128, 0).repeat_interleave(128, 1)
    seen = wide(full) | (wide(partial) & torch.ones(512, 512, device="cuda", dtype=torch.bool).tril())
    check(q, k, v, None, gallery.causal, mask, seen.expand(B, H, 512, 512))


@pytest.mark.parametrize("D, score_mod", [
    (128, None), *(pytest.param(256, score_mod, marks=pytest.mark.slow) for score_mod in (
        None, lambda score, b, h, q, kv: score + 0.02 * (h + 1) * (kv - q)))], ids=("128", "256", "256-scores"))
def test_lists_that_lie(D, score_mod):
    """Counts outside of the lists are those of the nearest end, indices outside of the keys the nearest block's. Of
    wide heads a block is two tiles: of the last one the second is behind the keys, also where it is listed as full."""
    S = 300
    q, k, v = make(S, S, D)
    mask = mask_of(gallery.causal, S, S)
    mask.kv_num_blocks[:, :, 0], mask.full_kv_num_blocks[:, :, 1] = 1 << 30, -5
    mask.kv_indices[:, :, 1], mask.full_kv_indices[:, :, 2] = -(1 << 30), 1 << 30
    mask.kv_num_blocks[:, :, 2], mask.full_kv_num_blocks[:, :, 2] = -(1 << 30), 1
    seen = torch.ones(S, S, device="cuda", dtype=torch.bool).tril()
    seen[128:256, 128:], seen[256:, :256], seen[256:, 256:] = False, False, True
    check(q, k, v, score_mod, block_mask=mask, seen=seen.expand(B, H, S, S))


def test_captured_indices_that_lie():
    """Indices outside a captured tensor are taken as the nearest inside; negative ones count from the end."""
    table = torch.full((3, 40), math.nan, device="cuda")[1]  # NaN around what is captured
    table[:] = torch.randn(40, device="cuda")
    inside = table[8:24]
    far = torch.tensor([5, -3, 1 << 40, -(1 << 40)], device="cuda").repeat(75)

    def lying(score, b, h, q, kv):
        return score + inside[far[q]] + inside[kv]

    def told(score, b, h, q, kv):
        at = torch.where(far[q] < 0, far[q] + 16, far[q]).clamp(0, 15)
        return score + inside[at] + inside[kv.clamp(0, 15)]

    q, k, v = make(300, 300)
    o, lse = tkq.flex_attention(q, k, v, lying, return_lse=True)
    gallery.judge((o, lse), (q, k, v), told, gallery.visible(None, B, H, 300, 300, "cuda"))


def test_numbers_compile_nothing():
    from tkq.runtime.compile import build

    q, k, v = make(300, 300)
    counts = []
    for n in (20, 150):
        check(q, k, v, None, gallery.sliding_window(n))
        counts.append(len(build._functions))
    assert counts[0] == counts[1]


def test_hard_scores():
    """Large scores, a huge element, rows of one value."""
    q, k, v = make(300, 300, scale=4.0)
    k[0, 1, 17] = 60
    q[1, 2, 5] = 0
    check(q, k, v, None, gallery.causal)
    check(q, k, v, gallery.causal_score, None, scale=0.3)


def test_far_from_a_softcap():
    """Scores far below it, far above, both in a tile, NaN and inf: of the kernel that `test_gallery` has."""
    q, k, v = make(576, 576, scale=4.0)
    q[:, 0] *= 0.02
    q[:, 1, ::3] *= 0.02
    check(q, k, v, gallery.softcap(20.0), gallery.causal)
    check(q.abs(), -k.abs(), v, gallery.softcap(20.0), gallery.causal, what="low")
    check(q, k, v, gallery.softcap(20.0), gallery.causal, what="turned", scale=-0.1)
    q[0, 2, 300], q[1, 3, 400, 7] = math.nan, math.inf
    o = tkq.flex_attention(q, k, v, gallery.softcap(20.0), mask_of(gallery.causal, 576, 576))
    assert (~o.isfinite().all(3)).nonzero().tolist() == [[0, 2, 300]]


def test_biases_that_grow():
    """Far beyond what exponents hold, to either side, with scores that are all negative: of the gallery's kernel."""
    q, k, v = make(576, 576)
    for slopes in (3.0, -3.0, 0.02):
        given = torch.full((H,), slopes, device="cuda")
        check(q, k, v, gallery.alibi(given), gallery.causal, what=f"slopes of {slopes}")
        check(q.abs(), -k.abs(), v, gallery.alibi(given), gallery.causal, what=f"negative, slopes of {slopes}")


@pytest.mark.slow
def test_far_from_a_softcap_of_biases():
    """Where other terms follow the softcap."""
    q, k, v = make(300, 300, scale=4.0)
    q[:, 1, ::3] *= 0.02
    slopes = torch.rand(H, device="cuda")
    check(q, k, v, lambda s, b, h, q, kv: 20 * torch.tanh(s / 20) + slopes[h] * (kv - q), gallery.causal)


def test_same_bits_and_graphs():
    """Bit for bit in each run, and under a CUDA graph whose mask is rebuilt in place."""
    q, k, v = make(600, 600)
    masks = [mask_of(gallery.sliding_window(n), 600, 600) for n in (50, 500)]
    lists = [(m.kv_num_blocks, m.kv_indices, m.full_kv_num_blocks, m.full_kv_indices) for m in masks]
    block_mask = mask_of(gallery.causal, 600, 600)
    held = [block_mask.kv_num_blocks, block_mask.kv_indices, block_mask.full_kv_num_blocks,
            block_mask.full_kv_indices]
    wanted = tkq.flex_attention(q, k, v, None, block_mask)
    assert torch.equal(wanted, tkq.flex_attention(q, k, v, None, block_mask))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = tkq.flex_attention(q, k, v, None, block_mask)
    for of in (*lists, [x.clone() for x in held]):
        for x, new in zip(held, of):
            x.copy_(new)
        graph.replay()
        assert torch.equal(o, tkq.flex_attention(q, k, v, None, block_mask))


def test_longer_than_one_wave():
    """More tasks than SMs, many blocks of each; so many that their order follows what they visit."""
    q, k, v = make(2048, 2048, heads=(1, 32, 8))
    check(q, k, v, None, gallery.sliding_window(700))
    check(*make(300, 300, heads=(8, 48, 8)), mask_mod=gallery.sliding_window(200))


def test_flash_attn():
    """Of (B, S, H, D), by the same kernel."""
    q, k, v = make(500, 500, heads=(B, 8, 2))
    rows_first = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    mask = mask_of(gallery.causal, 500, 500, None, None)
    o, lse = tkq.flex_attention(q, k, v, None, mask, 0.1, True, True)
    found = tkq.flash_attn(*rows_first, softmax_scale=0.1, return_lse=True, block_mask=mask)
    assert torch.equal(found[0], o.transpose(1, 2)) and torch.equal(found[1], lse) and found[0].is_contiguous()


LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks", "q_indices",
         "full_q_num_blocks", "full_q_indices")


@pytest.mark.parametrize("name, S, size", [("causal", 1000, 128), ("prefix_document", 3000, 64),
                                           ("standalone_sparse", 700, (40, 130)), ("of_every_type", 2500, (7, 9)),
                                           ("causal", 1000, (32, 128))])
def test_create_block_mask(name, S, size):
    """Number by number torch's. Of 3000 tokens a warp has two blocks of a row, of 2500 four, in rows of more
    blocks than a warp loads at a time. Of 32 causal queries and 128 keys all of a step's 64 keys may be seen, and not
    all behind them."""
    if name == "of_every_type":
        mask_mod = gallery.of_every_type(S, "cuda")
    else:
        mask_mod = gallery.gallery(B, H, S, "cuda")[name][1]
    ours, theirs = (make(mask_mod, B, H, S, S, device="cuda", BLOCK_SIZE=size) for make in (
        tkq.create_block_mask, create_block_mask))
    for of in LISTS:
        assert torch.equal(getattr(ours, of), getattr(theirs, of)), of
