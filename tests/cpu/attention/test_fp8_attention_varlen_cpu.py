"""Float8 attention of packed sequences where there is no GPU: where each sequence's V goes, CPU tensors, plans, and
what is refused."""
import itertools
import random

import numpy
import pytest
import torch

import tkq
from tests.cpu.attention.backward.test_attention_backward_packed_cpu import Simulated, disturb
from tests.helpers.emulation.warp import Memory, instead_of_the_dsl
from tkq.attention.common import bounds, sequences
from tkq.attention.common.integers import ceil_div
from tkq.attention.common.operands import Sequences
from tkq.attention.fp8 import packed, varlen_launch
from tkq.attention.fp8.check import Call, Lengths
from tkq.attention.fp8.config import Fp8Config
from tkq.attention.fp8.plan import plan
from tkq.attention.fp8.spec import ACCUMULATE, HEAD_DIMS, KEYS_TOGETHER, Fp8Spec, TransposePackedSpec
from tkq.reference import attention_fp8 as reference

F8, INT = torch.float8_e4m3fn, torch.int32


@pytest.mark.parametrize("count", (1, 3, 31, 32, 33, 70))
@pytest.mark.parametrize("in_use", (False, True))
def test_tiles_of_v(count, in_use, monkeypatch):
    """By the kernel's own function, tile by tile: each sequence begins with its first tile and has a tile also without
    keys, no tile has keys of two, and all others are empty; the same for cu_seqlens that mean the same."""
    instead_of_the_dsl(monkeypatch, sequences, bounds, packed)
    draw, kernel = random.Random(count), packed.TransposePacked(TransposePackedSpec(in_use))
    lengths = [draw.choice((0, 0, 1, 127, 128, 129, 300)) for _ in range(count)]
    starts = numpy.cumsum([0, *lengths]).tolist()
    total = starts[-1] + draw.choice((0, 200))
    used = Memory([n // 2 for n in lengths]) if in_use else None
    keys = [n // 2 if in_use else n for n in lengths]
    v = torch.empty(total, 1, 32, dtype=F8, device="meta")
    cu = torch.empty(count + 1, dtype=INT, device="meta")
    monkeypatch.setattr(varlen_launch, "launcher", lambda *given: None)
    tiles = varlen_launch.transposition(Call(v, v, v), Lengths(cu, cu)).v.shape[2] // KEYS_TOGETHER
    for given in (starts, *(disturb(starts, total, seed) for seed in range(3))):
        cu = Memory(given)
        layout = Simulated(Sequences(cu, cu, None, used), total, total)
        found = [kernel.keys(tile, layout) for tile in range(tiles)]
        wanted = [()] * tiles
        for s, (start, n) in enumerate(zip(starts, keys)):
            first = layout.first_slot(KEYS_TOGETHER, s, start)
            for i in range(ceil_div(n, KEYS_TOGETHER)):
                assert not wanted[first + i], "a tile of two sequences"
                wanted[first + i] = (start + i * KEYS_TOGETHER, start + n)
        assert [(begin, end) if begin < end else () for begin, end in found] == wanted
        own = [layout.first_slot(KEYS_TOGETHER, s, starts[s]) for s in range(count + 1)]
        assert all(a < b for a, b in itertools.pairwise(own)) and own[-1] < tiles
        assert all(wanted[tile] == () for tile, n in zip(own, [*keys, 0]) if n == 0)


def test_plans():
    """A tile of V is of one sequence; registers are left for the producer."""
    for dim, accumulate, causal in itertools.product(HEAD_DIMS, ACCUMULATE, (False, True)):
        config = plan(Fp8Spec(dim, causal, accumulate=accumulate, varlen=True))
        assert KEYS_TOGETHER % config.kv == 0 and config.registers[0] >= 40
    with pytest.raises(ValueError, match="kv is 96, of packed sequences"):
        Fp8Config(kv=96).check(64, True, True)
    with pytest.raises(ValueError, match="belong to varlen"):
        Fp8Spec(seqused_k=True)


PAGES = dict(k=torch.zeros(5, 4, 2, 64, dtype=F8), v=torch.zeros(5, 4, 2, 64, dtype=F8))


def _call(**changed):
    g = torch.Generator().manual_seed(0)
    new = lambda *shape: torch.randn(*shape, generator=g).to(F8)
    scale = lambda: torch.rand(3, 2, generator=g)
    return dict(q=new(14, 6, 64), k=new(19, 2, 64), v=new(19, 2, 64),
                cu_seqlens_q=torch.tensor([0, 5, 5, 12], dtype=INT),
                cu_seqlens_k=torch.tensor([0, 9, 12, 19], dtype=INT), max_seqlen_q=7, max_seqlen_k=9, q_descale=scale(),
                k_descale=scale(), v_descale=scale()) | changed


@pytest.mark.parametrize("options", ({}, dict(causal=True), dict(window_size=(2, 1), out_dtype=torch.float16)), ids=str)
@pytest.mark.parametrize("in_use", (False, True))
def test_cpu_tensors(options, in_use):
    """Each sequence as flash_attn_fp8 has it; rows of none are 0."""
    given, used = _call(), {}
    if in_use:
        used = dict(seqused_q=torch.tensor([3, 9, -1], dtype=INT), seqused_k=torch.tensor([4, 1, 99], dtype=INT))
    o, lse = tkq.flash_attn_fp8_varlen(**given, **used, **options, return_lse=True)
    assert o.shape == (14, 6, 64) and lse.shape == (6, 14) and lse.dtype == torch.float32
    rest = torch.ones(14, dtype=torch.bool)
    for s, ((a, b), (c, d)) in enumerate((((0, 3), (0, 4)), ((5, 5), (9, 10)), ((5, 5), (12, 19))) if in_use else (
            ((0, 5), (0, 9)), ((5, 5), (9, 12)), ((5, 12), (12, 19)))):
        rest[a:b] = False
        one = {n: given[n][None, x:y] for n, x, y in (("q", a, b), ("k", c, d), ("v", c, d))}
        one |= {n: given[n][s:s + 1] for n in ("q_descale", "k_descale", "v_descale")}
        want, want_lse = tkq.flash_attn_fp8(**one, **options, return_lse=True)
        assert torch.equal(o[a:b], want[0]) and torch.equal(lse[:, a:b], want_lse[0])
    assert not o[rest].any() and torch.isneginf(lse[:, rest]).all()


def test_pages():
    """As the same keys packed; a row that sees a page that is not there is NaN, and no other."""
    given = _call()
    pages = {n: torch.full((9, 4, 2, 64), 0x7F, dtype=torch.uint8) for n in "kv"}
    table = torch.tensor([[7, 3, 0], [2, 99, -1], [5, 8, 4]], dtype=INT)
    for n, (s, (a, b)) in itertools.product("kv", enumerate(((0, 9), (9, 12), (12, 19)))):
        for i in range(b - a):
            pages[n][table[s, i // 4], i % 4] = given[n].view(torch.uint8)[a + i]
    paged = given | {n: x.view(F8) for n, x in pages.items()} | dict(
        cu_seqlens_k=None, seqused_k=torch.tensor([9, 3, 7], dtype=INT), block_table=table)
    want, found = (tkq.flash_attn_fp8_varlen(**of, causal=True, return_lse=True) for of in (given, paged))
    assert torch.equal(found[0], want[0]) and torch.equal(found[1], want[1])
    table[2, 0] = -1  # the first four keys of the last sequence, of seven
    o, lse = tkq.flash_attn_fp8_varlen(**paged, window_size=(2, 0), return_lse=True)
    of_all, _ = tkq.flash_attn_fp8_varlen(**given, window_size=(2, 0), return_lse=True)
    assert o[5:11].isnan().all() and lse[:, 5:11].isnan().all() and torch.equal(o[11:], of_all[11:])
    none = paged | {n: torch.empty(0, 4, 2, 64, dtype=F8) for n in "kv"}
    assert not tkq.flash_attn_fp8_varlen(**none).any()


def test_nothing_to_do():
    given = _call(q=torch.empty(0, 6, 64, dtype=F8), cu_seqlens_q=torch.zeros(4, dtype=INT))
    assert tkq.flash_attn_fp8_varlen(**given).shape == (0, 6, 64)
    none = torch.zeros(1, dtype=INT)
    empty = {f"{n}_descale": torch.ones(0, 2) for n in "qkv"}
    assert not tkq.flash_attn_fp8_varlen(**_call(cu_seqlens_q=none, cu_seqlens_k=none, **empty)).any()


def test_the_reference_in_float64():
    given = _call()
    longest = {n: given.pop(n) for n in ("max_seqlen_q", "max_seqlen_k")}
    o, lse = reference.flash_attn_fp8_varlen(**given, out_dtype=torch.float64)
    assert o.dtype == lse.dtype == torch.float64
    torch.testing.assert_close(o.float(), tkq.flash_attn_fp8_varlen(**given, **longest).float(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("error, words, changed", [
    (TypeError, "flash_attn_fp8_varlen: q", dict(q=torch.zeros(14, 6, 64))),
    (TypeError, "cu_seqlens_k", dict(cu_seqlens_k=torch.zeros(4, dtype=torch.int64))),
    (TypeError, "seqused_q", dict(seqused_q=torch.zeros(3))),
    (TypeError, "max_seqlen_q", dict(max_seqlen_q=7.0)),
    (ValueError, "max_seqlen_k", dict(max_seqlen_k=-1)),
    (ValueError, "q: has 4 dimensions", dict(q=torch.zeros(1, 14, 6, 64, dtype=F8))),
    (NotImplementedError, "flash_attn_fp8_varlen: head_dim is 48", dict(q=torch.zeros(14, 6, 48, dtype=F8))),
    (ValueError, "k: shape", dict(k=torch.zeros(19, 2, 128, dtype=F8))),
    (ValueError, "v: shape", dict(v=torch.zeros(18, 2, 64, dtype=F8))),
    (ValueError, "must be a multiple", dict(q=torch.zeros(14, 5, 64, dtype=F8))),
    (ValueError, "q_descale: shape", dict(q_descale=torch.ones(2, 2))),
    (ValueError, "v_descale: shape", dict(v_descale=torch.ones(3, 6))),
    (ValueError, "cu_seqlens_q has 5 numbers, cu_seqlens_k 4", dict(cu_seqlens_q=torch.zeros(5, dtype=INT),
                                                                   q_descale=None, k_descale=None, v_descale=None)),
    (ValueError, "cu_seqlens_q: has 2 dimensions", dict(cu_seqlens_q=torch.zeros(1, 4, dtype=INT), q_descale=None,
                                                        k_descale=None, v_descale=None)),
    (ValueError, "seqused_k: shape", dict(seqused_k=torch.zeros(4, dtype=INT))),
    (ValueError, "cu_seqlens_q begins with 2", dict(cu_seqlens_q=torch.tensor([2, 5, 5, 12], dtype=INT))),
    (ValueError, "seqused_k", dict(seqused_k=torch.ones(6, dtype=INT)[::2])),
    (ValueError, "v: strides are .* its last dimension must", dict(
        v=torch.zeros(2, 64, 32, dtype=F8).permute(2, 0, 1)[:19])),
    (ValueError, "k: strides are .* stride 0 must", dict(k=torch.zeros(19, 136, dtype=F8)[:, :128].unflatten(
        1, (2, 64)))),
    (TypeError, "cu_seqlens_k: got NoneType, .* block_table is None", dict(cu_seqlens_k=None)),
    (ValueError, "cu_seqlens_k and block_table are given", dict(block_table=torch.zeros(3, 1, dtype=INT))),
    (ValueError, "seqused_k is None, with block_table", dict(block_table=torch.zeros(3, 1, dtype=INT),
                                                             cu_seqlens_k=None)),
    (ValueError, "k: has 3 dimensions", dict(block_table=torch.zeros(3, 1, dtype=INT), cu_seqlens_k=None,
                                             seqused_k=torch.ones(3, dtype=INT))),
    (ValueError, "block_table: shape", dict(block_table=torch.zeros(2, 1, dtype=INT), cu_seqlens_k=None,
                                            seqused_k=torch.ones(3, dtype=INT), **PAGES)),
    (TypeError, "block_table", dict(block_table=torch.zeros(3, 1), cu_seqlens_k=None,
                                    seqused_k=torch.ones(3, dtype=INT), **PAGES)),
    (ValueError, "block_table", dict(block_table=torch.zeros(3, 4, dtype=INT)[:, ::2], cu_seqlens_k=None,
                                     seqused_k=torch.ones(3, dtype=INT), **PAGES)),
    (ValueError, "softmax_scale", dict(softmax_scale=-1.0)),
    (ValueError, "accumulate", dict(accumulate="slow")),
    (ValueError, "window_size", dict(window_size=(-2, 0))),
])
def test_what_is_refused(error, words, changed):
    with pytest.raises(error, match=words):
        tkq.flash_attn_fp8_varlen(**_call(**changed))


def test_gradients_are_refused():
    with pytest.raises(NotImplementedError, match="v_descale requires a gradient"):
        tkq.flash_attn_fp8_varlen(**_call(v_descale=torch.ones(3, 2, requires_grad=True)))
