"""flash_attn_fp8_varlen on a GPU: each sequence by itself against float64 of what its numbers mean, and nothing of its
neighbours."""
import random

import pytest
import torch

from tests.helpers.attention.fp8 import F8, SCORES
from tests.helpers.attention.fp8_varlen import EDGES, NAMES, NAN, call, compare, make, rows_of
from tests.helpers.sanitizer.nan_fill import poisoned
from tkq.attention.fp8 import varlen_launch
from tkq.attention.fp8.check import Call, Lengths
from tkq.reference import attention_fp8 as reference
from tkq.tile.float8 import operand_column

CASES = ((64, "two_level", {}), (128, "two_level", dict(causal=True)), (256, "two_level", dict(causal=True)),
         (128, "fast", {}), (256, "fast", dict(causal=True)), (64, "fast", dict(left=70, right=20)), *(
             pytest.param(128, "two_level", window, marks=pytest.mark.slow)
             for window in (dict(left=33, right=0), dict(left=600))))


@pytest.mark.parametrize("dim, accumulate, options", CASES, ids=str)
def test_lengths(dim, accumulate, options):
    """Ends within and between tiles; sequences without queries, without keys; NaN behind the last one."""
    compare(make(EDGES, 4, 2, dim, spare=150), "edges", accumulate=accumulate, **options)
    compare(make(EDGES[::-1], 3, 3, dim), "the other way round", accumulate=accumulate, **options)


@pytest.mark.parametrize("causal", (False, True))
def test_few_and_many(causal):
    """One long sequence; none with a key; more than a warp looks at together, most of them short."""
    compare(make([(4099, 4099)], 2, 1, 128), "one", causal=causal)
    compare(make([(0, 0), (5, 0), (0, 3)], 2, 2, 128, spare=3), "no row sees a key", causal=causal)
    choose = random.Random(0)
    short = [(choose.randrange(6), choose.randrange(6)) for _ in range(400)] + [(700, 900)]
    compare(make(short, 2, 1, 64, spare=9), "short", every=29, causal=causal)


def test_results():
    """float16; without lse, and without descales, the other forms; heads narrower than their tiles."""
    given = make(EDGES, 4, 2, 96)
    for lse in (False, True):
        compare(given, "fp16", out_dtype=torch.float16, return_lse=lse, causal=True)
    plain = {n: x for n, x in given.items() if "descale" not in n}
    compare(plain, "no descales", softmax_scale=2e-5, causal=True)
    compare(plain | dict(v_descale=given["v_descale"]), "of v alone", softmax_scale=2e-5)


def test_hard_data():
    for scale, what in ((20.0, "large scores"), (1e-3, "scores near 0")):
        compare(make(EDGES, 4, 2, 128, scale=scale), what, causal=True, ulps=2, scores=SCORES)
    given = make(EDGES, 4, 2, 128)
    same = given | dict(k=given["k"][:1].expand_as(given["k"]).contiguous())
    compare(same, "equal keys", ulps=2, scores=SCORES)
    compare(given | dict(v=torch.ones_like(given["v"], dtype=torch.float32).to(F8)), "constant values", ulps=2)
    wide = {n: torch.cat([given[n].view(torch.uint8)] * 2, 1).view(F8)[:, :given[n].shape[1]] for n in NAMES}
    o, lse = call(given, causal=True)
    again = call(given | wide, causal=True)
    assert torch.equal(again[0], o) and torch.equal(again[1], lse), "strides"


@pytest.mark.parametrize("dim, causal", ((128, False), *(
    pytest.param(dim, True, marks=pytest.mark.slow) for dim in (64, 256))))
def test_what_is_not_in_use_is_not_looked_at(dim, causal):
    given = make(EDGES, 4, 2, dim, spare=50)
    for n, of in zip("qk", zip(*EDGES, strict=True), strict=True):
        given[f"seqused_{n}"] = torch.tensor([rows - rows // 3 for rows in of], device="cuda", dtype=torch.int32)
    for n in NAMES:
        for a, b in _rest(given, "k" if n == "v" else n):
            given[n].view(torch.uint8)[a:b] = NAN
    compare(given, "NaN behind what is in use", causal=causal)
    compare({n: x for n, x in given.items() if n != "seqused_q"} | dict(q=make(EDGES, 4, 2, dim)["q"]), "keys alone",
            causal=causal)


def _rest(given, which):
    """The rows of each sequence that are not in use."""
    ends = given[f"cu_seqlens_{which}"].tolist()[1:]
    return [(end, to) for (_, end), to in zip(rows_of(given, which), ends, strict=True)]


@pytest.mark.parametrize("dim", (64, 128))
def test_a_sequence_s_nan_stays_in_it(dim):
    """In all that it has, its descales too: what another one's tiles end with is none of its."""
    given = make(EDGES, 4, 2, dim, spare=5)
    want, want_lse = call(given)
    bad = {n: x.clone() for n, x in given.items()}
    for s in (2, 4, 8, 10):
        for n in NAMES:
            a, b = rows_of(given, "k" if n == "v" else n)[s]
            bad[n].view(torch.uint8)[a:b] = NAN
            bad[f"{n}_descale"][s] = torch.nan
    got, got_lse = call(bad)
    for s, (a, b) in enumerate(rows_of(given, "q")):
        if s in (2, 4, 8, 10):
            assert got[a:b].isnan().all() and got_lse[:, a:b].isnan().all()
        else:
            assert torch.equal(got[a:b], want[a:b]) and torch.equal(got_lse[:, a:b], want_lse[:, a:b]), s
    end = int(given["cu_seqlens_q"][-1])
    assert not got[end:].any() and torch.isneginf(got_lse[:, end:]).all()


@pytest.mark.parametrize("accumulate, options", (("two_level", dict(causal=True)), ("fast", dict(left=70, right=20))))
def test_results_do_not_depend_on_the_others(accumulate, options):
    """Bit for bit what comes out for the sequence alone; nor on how long they are said to be, nor on the run."""
    given = make(EDGES, 4, 2, 128)
    o, lse = call(given, accumulate=accumulate, **options)
    for longest in (0, 1, 1 << 30):
        again = call(given, accumulate=accumulate, longest=longest, **options)
        assert torch.equal(again[0], o) and torch.equal(again[1], lse)
    for s in (2, 4, 8):
        (a, b), (c, d) = (rows_of(given, n)[s] for n in "qk")
        ends = [torch.tensor([0, n], device="cuda", dtype=torch.int32) for n in (b - a, d - c)]
        alone = dict(q=given["q"][a:b], k=given["k"][c:d], v=given["v"][c:d], cu_seqlens_q=ends[0],
                     cu_seqlens_k=ends[1], **{f"{n}_descale": given[f"{n}_descale"][s:s + 1] for n in NAMES})
        found = call(alone, accumulate=accumulate, **options)
        assert torch.equal(found[0], o[a:b]) and torch.equal(found[1], lse[:, a:b]), s


@pytest.mark.parametrize("in_use", (False, True))
def test_values_are_transposed(in_use):
    """Each sequence's into tiles of its own, in the order of the operand, with zeros behind them."""
    order = torch.tensor([16 * (i // 16) + operand_column(i % 16) for i in range(128)], device="cuda")
    for keys, heads, dim in (([0, 1, 127, 128, 129, 0, 300], 3, 64), ([1] * 70 + [1000], 2, 32), ([5], 1, 256)):
        given = make([(1, n) for n in keys], heads, heads, dim, spare=77)
        given["v"] = torch.randint(0, 256, given["v"].shape, dtype=torch.uint8, device="cuda").view(F8)
        if in_use:
            given["seqused_k"] = torch.tensor([n // 2 for n in keys], device="cuda", dtype=torch.int32)
        with poisoned():
            before = varlen_launch.transposition(Call(*(given[n] for n in NAMES)), Lengths(
                *(given.get(n) for n in Lengths._fields[:4])))
            before.launch.run(*before.launch.arguments)
        found = before.v.view(torch.uint8)
        wanted = torch.zeros(found.shape[2], heads, dim, dtype=torch.uint8, device="cuda")
        for s, (a, b) in enumerate(rows_of(given, "k")):
            first = 128 * (a // 128 + s)
            wanted[first:first + b - a] = given["v"].view(torch.uint8)[a:b]
        wanted = wanted.unflatten(0, (-1, 128))[:, order].flatten(0, 1)
        assert torch.equal(found, wanted.permute(1, 2, 0)), (keys, heads, dim)


def _paged(page, dim) -> tuple[dict, dict]:
    """(a call, the same of packed keys): pages in any order, those of no sequence full of NaN, as are rows behind a
    sequence's last key."""
    g = torch.Generator("cuda").manual_seed(page)
    lengths = [(1, 1), (70, 300), (0, 129), (130, 130), (5, 0), (64, 257)]
    n = -(-max(keys for _, keys in lengths) // page) + 1
    given = make(lengths, 4, 2, dim)
    table = torch.randperm(len(lengths) * n + 3, device="cuda", generator=g)[:len(lengths) * n].view(-1, n).int()
    pages = {}
    for name in "kv":
        pages[name] = torch.full((len(lengths) * n + 3, page, 2, dim), NAN, dtype=torch.uint8, device="cuda")
        for s, (a, b) in enumerate(rows_of(given, "k")):
            own = torch.full((n * page, 2, dim), NAN, dtype=torch.uint8, device="cuda")
            own[:b - a] = given[name].view(torch.uint8)[a:b]
            pages[name][table[s].long()] = own.view(n, page, 2, dim)
        pages[name] = pages[name].view(F8)
    used = given["cu_seqlens_k"].diff().int()
    return given | pages | dict(cu_seqlens_k=None, seqused_k=used, block_table=table), given


@pytest.mark.parametrize("page, dim, options", ((1, 64, {}), (16, 128, dict(causal=True)), (48, 256, dict(causal=True)),
                                                pytest.param(256, 128, dict(left=70, right=20),
                                                             marks=pytest.mark.slow)), ids=str)
def test_pages(page, dim, options):
    """Bit for bit as the same keys packed; lengths beyond the table are those of the table, whose rows all have
    numbers then."""
    paged, packed = _paged(page, dim)
    want, found = call(packed, **options), call(paged, **options)
    assert torch.equal(found[0], want[0]) and torch.equal(found[1], want[1])
    numbers = {n: (100 * torch.randn(paged[n].shape, device="cuda")).clamp(-448, 448).to(F8) for n in "kv"}
    more = paged | numbers | dict(seqused_k=torch.full_like(paged["seqused_k"], (1 << 31) - 1))
    k, v, cu = reference.of_pages(**numbers, block_table=paged["block_table"])
    want_of_all, of_all = call(packed | dict(k=k, v=v, cu_seqlens_k=cu), **options), call(more, **options)
    assert torch.isfinite(want_of_all[0]).all()
    assert torch.equal(of_all[0], want_of_all[0]) and torch.equal(of_all[1], want_of_all[1])
    halves = {n: torch.cat([paged[n].view(torch.uint8)] * 2, 2).view(F8)[:, :, :2] for n in "kv"}
    assert torch.equal(call(paged | halves, **options)[0], want[0])


def test_pages_that_are_not_there():
    """Rows that see a key of one are NaN; those of which a window keeps it away are as with a page of any numbers."""
    paged, packed = _paged(16, 128)
    for number in (-1, 1 << 30, -(1 << 31), int(paged["k"].shape[0])):
        table = paged["block_table"].clone()
        table[1, 2], table[3, 0], table[5, 16:] = number, number, number  # keys 32 to 47, 0 to 15, and 256
        found, lse = call(paged | dict(block_table=table), left=100, right=0)
        want, want_lse = call(packed, left=100, right=0)
        bad = torch.zeros(found.shape[0], dtype=torch.bool, device="cuda")
        for s, first, last in ((3, 0, 15), (5, 256, 256)):  # the keys of sequence 1 are too far away
            (a, b), keys = rows_of(packed, "q")[s], int(paged["seqused_k"][s])
            own = torch.arange(b - a, device="cuda") + keys - (b - a)
            bad[a:b] = (own >= first) & (own - 100 <= last)
        assert found[bad].isnan().all() and lse[:, bad].isnan().all()
        assert torch.equal(found[~bad], want[~bad]) and torch.equal(lse[:, ~bad], want_lse[:, ~bad])
