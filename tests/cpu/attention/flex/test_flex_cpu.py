"""tkq.flex_attention on the CPU: the reference against dense float64, arguments, the kernel's spec."""
import itertools

import numpy
import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

import tkq
from tests.helpers.attention import flex_gallery as gallery
from tests.helpers.emulation.finish import function
from tests.helpers.emulation.flex_lists import KeyTilesOnCpu, VisitOnCpu
from tkq.attention.flex import catalog
from tkq.attention.flex.check import blocks_of, tensors_of
from tkq.attention.flex.functions.trace import trace
from tkq.attention.flex.plan import plan
from tkq.attention.flex.spec import WIDTHS, FlexSpec, kv_tile_of

B, H, S = 2, 2, 144
META = torch.empty(3, device="meta")
GALLERY = gallery.gallery(B, H, S, "cpu")


def make(heads=H, kv_heads=H, Sq=S, Sk=S, D=64, dtype=torch.bfloat16):
    torch.manual_seed(0)
    return [torch.randn(B, h, s, D).to(dtype) for h, s in ((heads, Sq), (kv_heads, Sk), (kv_heads, Sk))]


@pytest.mark.parametrize("full, q_per, kv_per", [(True, 1, 1), (True, 2, 3), (False, 1, 2)])
def test_tiles_of_lists(monkeypatch, full, q_per, kv_per):
    """Those with the mask, then the full ones, either from the last to the first; also of numbers of blocks, and
    blocks, that lie. A task of none loads a tile that there is: no key lies before the first."""
    g, keys = torch.Generator().manual_seed(0), 17
    ints = lambda least, most, *shape: torch.randint(least, most, shape, generator=g, dtype=torch.int32)
    num, full_num = ints(-1, 6, 2, 3, 4), ints(-1, 4, 2, 3, 4)
    lists = num, ints(-3, 30, 2, 3, 4, 5), *((full_num, ints(-3, 30, 2, 3, 4, 3)) if full else (None, None))
    found, none = torch.full((2, 3, 4 * q_per + 1, 30), -9, dtype=torch.int32), 0
    function(KeyTilesOnCpu(full, q_per, kv_per), monkeypatch)(found, lists, keys)
    for b, h, tile in itertools.product(*map(range, found.shape[:3])):
        row = b, h, min(tile // q_per, 3)
        blocks = [lists[1][row][:max(num[row], 0)].flip(0),
                  *([lists[3][row][:max(full_num[row], 0)].flip(0)] if full else [])]
        blocks = torch.cat(blocks).clamp(0, -(-keys // kv_per) - 1)
        wanted = (blocks[:, None] * kv_per + torch.arange(kv_per).flip(0)).flatten()
        loaded = wanted.tolist()
        if not loaded:
            loaded, none = [found[b, h, tile, 0].item()], none + 1
            assert 0 <= loaded[0] < keys + kv_per
        assert found[b, h, tile].tolist() == loaded + [-9] * (30 - len(loaded))
    assert none


@pytest.mark.parametrize("mask", [None, gallery.causal])
@pytest.mark.parametrize("full, per", [(True, 1), (True, 2), (False, 2)])
def test_a_block_of_keys_is_told_what_is_loaded(monkeypatch, mask, full, per):
    """Of which queries its tiles are: also where blocks are said to need a mask, and there is none."""
    ints = lambda *numbers: torch.tensor(numbers, dtype=torch.int32)
    lists = [ints(3), ints(4, 1, 6, 0), *((ints(2), ints(3, 5, 0)) if full else ())]
    lists = [x.view(1, 1, 1, *x.shape[x.numel() == 1:]) for x in lists] + [None, None][2 * full:]
    graphs = [None if f is None else trace(name, f).graph for name, f in (
        ("score_mod", lambda score, b, h, q, kv: score + q), ("mask_mod", mask))]
    found, told = torch.full((2, 12), -9, dtype=torch.int32), ints(0)
    function(VisitOnCpu(*graphs, full, per), monkeypatch)(found, told, lists, 99)
    blocks = torch.tensor([4, 1, 6, 3, 5][:5 if full else 3])
    wanted = (blocks[:, None] * per + torch.arange(per)).flatten().tolist()
    assert told.item() == len(wanted) and found[:, :len(wanted)].tolist() == [wanted, wanted]


@pytest.mark.parametrize("name", ["causal", "standalone_sparse", "t5_bias", "relative_bias"])
def test_reference(name):
    score_mod, mask_mod = GALLERY[name]
    q, k, v = make()
    mask = mask_mod and create_block_mask(mask_mod, B, H, S, S, "cpu", 64)
    o, lse = tkq.flex_attention(q, k, v, score_mod, mask, return_lse=True)
    gallery.judge((o, lse), (q, k, v), score_mod, gallery.visible(mask_mod, B, H, S, S, "cpu"), name)


def test_forms():
    q, k, v = make(heads=4)
    with pytest.raises(ValueError, match="enable_gqa"):
        tkq.flex_attention(q, k, v)
    o = tkq.flex_attention(q, k, v, enable_gqa=True)
    same, aux = tkq.flex_attention(q, k, v, enable_gqa=True, return_aux=AuxRequest(lse=True))
    assert torch.equal(o, same) and aux.lse.shape == (B, 4, S)
    with pytest.raises(NotImplementedError, match="max_scores"):
        tkq.flex_attention(q, k, v, enable_gqa=True, return_aux=AuxRequest(max_scores=True))


def test_lse_may_be_written_in_place():
    """As any result: it is no view. A backward, which saved it, says so."""
    q, k, v = (x.clone().requires_grad_() for x in make())
    _, lse = tkq.flex_attention(q, k, v, enable_gqa=True, return_lse=True)
    assert not lse._is_view()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        lse.mul_(2).sum().backward()


def test_wrong_arguments():
    q, k, v = make()
    mask = create_block_mask(gallery.causal, None, None, S, S, "cpu", 64)
    with pytest.raises(TypeError, match="block_mask is int"):
        tkq.flex_attention(q, k, v, None, 3)
    with pytest.raises(ValueError, match="144 queries"):
        tkq.flex_attention(q[:, :, 1:], k, v, None, mask)
    with pytest.raises(NotImplementedError, match="multiples of 64"):
        tkq.flex_attention(q, k, v, None, create_block_mask(gallery.causal, None, None, S, S, "cpu", 48))
    with pytest.raises(NotImplementedError, match="head_dim is 36.*: query is .*36., value is .*36."):
        tkq.flex_attention(*(x[..., :36] for x in (q, k, v)))
    with pytest.raises(ValueError, match="B 1 or 2"):
        tkq.flex_attention(q, k, v, None, create_block_mask(gallery.causal, 3, None, S, S, "cpu", 64))
    with pytest.raises(ValueError, match="allowed is .* with B 1, H 1 or 2"):
        of_three = create_block_mask(gallery.causal, 3, None, S, S, "cpu", 64)
        tkq.flex_attention(*(x[:1] for x in (q, k, v)), None, of_three)
    with pytest.raises(ValueError, match="score_mod: a captured tensor .2,. is on meta, expected cpu"):
        tkq.flex_attention(q, k, v, gallery.alibi(torch.ones(H, device="meta")))


@pytest.mark.parametrize("D", WIDTHS)
@pytest.mark.parametrize("q_tile", [64, 128])
@pytest.mark.parametrize("block", [64, 128, 192])
def test_every_spec_has_a_plan(D, q_tile, block):
    kv_tile = kv_tile_of(block, D)
    config = plan(FlexSpec("bf16", D, q_tile=q_tile, kv_tile=kv_tile))
    assert config.tile_rows == q_tile and config.kv == kv_tile and block % kv_tile == 0
    if D > 128:
        with pytest.raises(ValueError, match=f"tiles of 128 keys and {D} columns"):
            FlexSpec("bf16", D, kv_tile=128)


def rows_first(q, k, v):
    o, lse = tkq.flash_attn(*(x.transpose(1, 2) for x in (q, k, v)), score_mod=gallery.causal_score, return_lse=True)
    return o.transpose(1, 2), lse


def heads_first(q, k, v):
    return tkq.flex_attention(q, k, v, gallery.causal_score, return_lse=True)


@pytest.mark.parametrize("op, call", [("flex_attention", heads_first), ("flash_attn", rows_first)])
def test_wide_heads(op, call):
    """As others, with and without gradients, also by torch.compile; wider ones are refused before anything is
    computed."""
    q, k, v = torch.randn(3, 1, 2, 40, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    seen = gallery.visible(None, 1, 2, 40, 40, "cpu")
    gallery.judge(call(q, k, v), (q, k, v), gallery.causal_score, seen)
    leaves, do = [x.requires_grad_() for x in (q, k, v)], torch.randn(q.shape)
    wanted = torch.autograd.grad(gallery.dense(*leaves, gallery.causal_score, seen)[0], leaves, do.double())
    wider = torch.randn(3, 1, 2, 40, 264).bfloat16()
    for run in (call, torch.compile(call, fullgraph=True, backend="eager")):
        found = torch.autograd.grad(run(q, k, v)[0], leaves, do.bfloat16())
        assert all((a.double() - b).norm() < 1e-2 * b.norm() for a, b in zip(found, wanted))
        for x in (wider, wider.clone().requires_grad_()):
            with pytest.raises(Exception, match=f"{op}: head_dim is 264, supported .*from 8 to 256"):
                run(*x)


def test_shipped_kernels_are_those_of_functions():
    assert trace("mask_mod", gallery.causal).graph == catalog.causal()
    assert trace("score_mod", GALLERY["alibi"][0]).graph == catalog.alibi()
    assert trace("score_mod", GALLERY["softcap"][0]).graph == catalog.softcap()
    names = [kernel.name for kernel in catalog.shipped()]
    assert len(set(names)) == len({kernel.recipe for kernel in catalog.shipped()}) == len(names)


LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks", "q_indices",
         "full_q_num_blocks", "full_q_indices")


@pytest.mark.parametrize("name", ["causal", "standalone_sparse", "document"])
@pytest.mark.parametrize("size", [64, (32, 128)])
def test_block_masks_are_torchs(name, size):
    mask_mod = GALLERY[name][1]
    ours, theirs = (make(mask_mod, B, None, S, S, device="cpu", BLOCK_SIZE=size) for make in (
        tkq.create_block_mask, create_block_mask))
    for of in LISTS:
        assert torch.equal(getattr(ours, of), getattr(theirs, of)), of
    assert ours.shape == theirs.shape and ours.mask_mod is mask_mod


def test_wrong_block_masks():
    with pytest.raises(TypeError, match="BLOCK_SIZE is 3.5"):
        tkq.create_block_mask(gallery.causal, None, None, 8, 8, "cpu", 3.5)
    with pytest.raises(ValueError, match="Q_LEN"):
        tkq.create_block_mask(gallery.causal, None, None, 0, 8, "cpu")
    with pytest.raises(TypeError, match="create_block_mask: mask_mod: gives torch.int32, allowed is bool"):
        tkq.create_block_mask(lambda b, h, q, kv: q, None, None, 8, 8, "cpu")
    with pytest.raises(NotImplementedError, match="create_block_mask: mask_mod: aten.lgamma"):
        tkq.create_block_mask(lambda b, h, q, kv: torch.lgamma(q) > kv, None, None, 8, 8, "cpu")
    with pytest.raises(ValueError, match="create_block_mask: mask_mod: a captured tensor .3,. is on meta"):
        tkq.create_block_mask(lambda b, h, q, kv: META[q] > kv, None, None, 8, 8, "cpu")
    with pytest.raises(TypeError, match="create_block_mask: mask_mod is None"):
        tkq.create_block_mask(None, None, None, 8, 8, "cpu")


MADE_WRONG = {
    "kv_indices": (TypeError, dict(kv_indices=None)), "kv_num_blocks": (TypeError, dict(kv_num_blocks=[1])),
    "sparse": (TypeError, dict(kv_num_blocks=torch.ones(1, 1, 3, dtype=torch.int32).to_sparse())),
    "BLOCK_SIZE is None": (TypeError, dict(BLOCK_SIZE=None)),
    "BLOCK_SIZE is .128,": (TypeError, dict(BLOCK_SIZE=(128,))),
    "BLOCK_SIZE is .128.0": (TypeError, dict(BLOCK_SIZE=(128.0, 128.0))),
    "seq_lengths is None": (TypeError, dict(seq_lengths=None)),
    "seq_lengths is .300": (TypeError, dict(seq_lengths=(300,))),
}


@pytest.mark.parametrize("words", MADE_WRONG)
def test_block_masks_of_wrong_parts(words):
    error, parts = MADE_WRONG[words]
    mask = tkq.create_block_mask(gallery.causal, None, None, 300, 300, "cpu")
    vars(mask).update(parts)
    with pytest.raises(error, match=words):
        tkq.flex_attention(*torch.randn(3, 1, 2, 300, 64).bfloat16(), block_mask=mask)


def test_block_masks_without_a_part_of_the_other_lists():
    """Which are made again."""
    mask = tkq.create_block_mask(gallery.causal, None, None, 300, 300, "cpu")
    q, k = torch.randn(2, 1, 2, 300, 64).bfloat16()
    for name in ("q_indices", "full_q_num_blocks"):
        half = tkq.create_block_mask(gallery.causal, None, None, 300, 300, "cpu")
        setattr(half, name, None)
        assert blocks_of(half, q, k)[1].queries is None and blocks_of(mask, q, k)[1].queries is not None
        assert len(tensors_of(half, q, k).lists) == 4 and len(tensors_of(mask, q, k).lists) == 8


def test_sizes_of_blocks():
    """NumPy's numbers are numbers; a block of more than all is one block, never full."""
    everything = lambda b, h, q, kv: kv >= 0
    sizes = [numpy.int64(128), 2 ** 31 - 1, (64, 2 ** 31 - 1)]
    found = [tkq.create_block_mask(everything, None, None, 100, 50, "cpu", size) for size in sizes]
    assert [mask.BLOCK_SIZE for mask in found] == [(128, 128), (2 ** 31 - 1,) * 2, sizes[2]]
    assert all(mask.kv_num_blocks.eq(1).all() and not mask.full_kv_num_blocks.any() for mask in found)
    for size in (2 ** 31, 2 ** 70, 0):
        with pytest.raises(ValueError, match="BLOCK_SIZE"):
            tkq.create_block_mask(everything, None, None, 100, 50, "cpu", size)


def test_gradients_of_the_reference():
    q, k, v = (x.requires_grad_() for x in make(Sq=40, Sk=40))
    o = tkq.flex_attention(q, k, v, gallery.softcap(5.0))
    wanted, _ = gallery.dense(q, k, v, gallery.softcap(5.0), torch.ones(B, H, 40, 40, dtype=torch.bool))
    do = torch.randn_like(o)
    for ours, true in zip(torch.autograd.grad(o, (q, k, v), do), torch.autograd.grad(wanted, (q, k, v), do.double())):
        torch.testing.assert_close(ours, true, rtol=2e-2, atol=2e-2)


def test_what_is_no_request_and_no_heads():
    q, k, v = make()
    with pytest.raises(TypeError, match="flex_attention: return_aux is True, allowed are None and torch's AuxRequest"):
        tkq.flex_attention(q, k, v, return_aux=True)
    assert tkq.flex_attention(q[:, :0], k[:, :0], v[:, :0]).shape == (*q.shape[:1], 0, *q.shape[2:])
    odd = torch.complex(torch.ones(S), torch.ones(S)).conj().imag
    call = lambda x: tkq.flex_attention(q, k, v, lambda score, b, h, q_idx, kv_idx: score + x[kv_idx])
    assert odd.is_neg() and torch.equal(call(odd), call(odd.clone()))


@pytest.mark.parametrize("score_mod", [
    lambda s, b, h, q, k: 0.5 * k, lambda s, b, h, q, k: torch.where(q >= k, 0.0, -torch.inf),
    lambda s, b, h, q, k: 0.5 * h, lambda s, b, h, q, k: torch.zeros_like(s)])
def test_scores_that_do_not_depend_on_all_indices(score_mod):
    q, k, v = torch.randn(3, 2, 4, 9, 16).half()
    o, lse = tkq.flex_attention(q, k, v, score_mod=score_mod, return_lse=True)
    scores = torch.stack([torch.as_tensor(score_mod(torch.tensor(0.0), b, h, torch.tensor(i), torch.tensor(j))).float()
                          for b in range(2) for h in range(4) for i in range(9) for j in range(9)]).view(2, 4, 9, 9)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    torch.testing.assert_close(o.float(), scores.softmax(-1) @ v.float(), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("score_mod", [
    lambda s, b, h, q, k: torch.sqrt(torch.relu(s)), lambda s, b, h, q, k: torch.sqrt(s.clamp(min=0)),
    lambda s, b, h, q, k: torch.relu(s) ** 0.5, lambda s, b, h, q, k: s + torch.relu(s) ** 0,
    lambda s, b, h, q, k: torch.relu(s) ** (h * 1.0), lambda s, b, h, q, k: torch.sigmoid(10 * s - 85),
    lambda s, b, h, q, k: torch.sigmoid(s * s * s - 80)])
def test_slopes_that_are_infinite_where_a_branch_is_not_taken(score_mod):
    """As autograd goes: none of it reaches what the branch leaves out."""
    q, k, v, do = torch.randn(4, 1, 2, 20, 16).half()
    leaves = [x.requires_grad_() for x in (4 * q, k, v)]
    wide = [x.detach().float().requires_grad_() for x in leaves]
    o = tkq.flex_attention(*leaves, score_mod=score_mod)
    found = torch.autograd.grad(o, leaves, do)
    h = torch.arange(2.0)[None, :, None, None]
    scores = score_mod(wide[0] @ wide[1].mT * 0.25, None, h, None, None)
    want = torch.autograd.grad(scores.softmax(-1) @ wide[2], wide, do.float())
    for mine, theirs in zip(found, want):
        assert theirs.isfinite().all() and (mine.float() - theirs).norm() <= 1e-2 * theirs.norm() + 1e-3


@pytest.mark.parametrize("score_mod", [
    lambda s, b, h, q, k: torch.where(s > 0, torch.sqrt(s), 0.0), lambda s, b, h, q, k: torch.where(s > 0, s**1.5, 0.0),
    lambda s, b, h, q, k: torch.where(k == q, s, s / (k - q)),
    lambda s, b, h, q, k: torch.where(s > 0, s, torch.exp(300 * s) - 1)])
def test_slopes_that_are_infinite_before_a_branch_that_is_not_taken(score_mod):
    """Where autograd itself has NaN."""
    q, k, v, do = torch.randn(4, 1, 2, 20, 16).half()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    found = torch.autograd.grad(tkq.flex_attention(*leaves, score_mod=score_mod), leaves, do)
    assert all(x.isfinite().all() and x.any() for x in found)


@pytest.mark.parametrize("name, score_mod", [
    ("frexp", lambda s, b, h, q, k: torch.frexp(s)[0]), ("max", lambda s, b, h, q, k: torch.max(s, 0)[0])])
def test_operations_with_several_results_are_refused_by_name(name, score_mod):
    q = torch.randn(1, 1, 8, 16).half()
    with pytest.raises(NotImplementedError, match=f"score_mod: aten.{name}, which has several results"):
        tkq.flex_attention(q, q, q, score_mod=score_mod)


def test_a_block_mask_whose_lists_are_others():
    q = torch.randn(1, 1, 256, 64).bfloat16()
    mask, other = (create_block_mask(lambda b, h, i, j, n=n: j < n, 1, 1, 256, 256, device="cpu") for n in (128, 256))
    tkq.flex_attention(q, q, q, block_mask=mask)
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks", "q_indices",
                 "full_q_num_blocks", "full_q_indices", "mask_mod"):
        setattr(mask, name, getattr(other, name))
    assert torch.equal(tkq.flex_attention(q, q, q, block_mask=mask), tkq.flex_attention(q, q, q, block_mask=other))
