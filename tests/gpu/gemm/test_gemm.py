"""gemm on a GPU: exact where sums are, otherwise against float64 beside PyTorch at the same precision."""
import itertools
import math

import pytest
import torch

import tkq
from tests.helpers.process.streams import check_back_and_forth, on_a_side_stream
from tkq.gemm.dense import ops
from tkq.gemm.dense.config import Config
from tkq.gemm.dense.plan import TILES
from tkq.testing import assert_2x

MAJORS = tuple(itertools.product("km", "kn"))
SIZES = ((1, 8, 8), (7, 16, 16), (8, 64, 56), (63, 136, 64), (64, 256, 72), (65, 264, 128), (127, 128, 136),
         (128, 1000, 64), (129, 1024, 200), (255, 256, 320), (256, 512, 512), (257, 72, 1000), (1000, 1000, 8),
         (1000, 520, 264))
ODD_SIZES = ((1, 1, 8), (7, 7, 24), (64, 63, 64), (63, 65, 72), (129, 127, 128), (128, 255, 64), (300, 257, 200),
             (65, 1001, 136))
POISON = -77.0  # bf16, fp16 and fp32 hold it


def whole(rows, cols, dtype, major, pad=8, first=8, seed=0):
    """A (rows, cols) view of small whole numbers, whose sums are exact, between NaN. major: "r" or "c", rows or columns
    contiguous. first and pad that are not multiples of 8 make a base and a pitch that TMA does not take."""
    g = torch.Generator("cuda").manual_seed(seed + 31 * rows + cols)
    lines, length = (rows, cols) if major == "r" else (cols, rows)
    values = torch.randint(-4, 5, (lines, length), device="cuda", generator=g).to(dtype)
    pitch = first + -(-length // 8) * 8 + pad
    buffer = torch.full((lines + 2, pitch), math.nan, dtype=dtype, device="cuda")
    view = buffer[1:-1, first:first + length]
    view.copy_(values)
    return view if major == "r" else view.t()


def operands(size, a_major="k", b_major="n", dtype=torch.bfloat16, **kw):
    m, n, k = size
    return (whole(m, k, dtype, "r" if a_major == "k" else "c", **kw),
            whole(k, n, dtype, "c" if b_major == "k" else "r", seed=1, **kw))


def exact(a, b, out_dtype):
    return (a.double() @ b.double()).to(out_dtype)


def check_run(a, b, config=None, out_dtype=None, first=8, blocks=None, what=""):
    """Run into a view between poisoned rows and columns: the result is exact and nothing else is touched."""
    (m, _), n, out_dtype = a.shape, b.shape[1], out_dtype or a.dtype
    buffer = torch.full((m + 2, first + -(-n // 8) * 8 + 8), POISON, dtype=out_dtype, device="cuda")
    c = buffer[1:-1, first:first + n]
    ops.run(a, b, c, config, blocks)
    want = torch.full_like(buffer, POISON)
    want[1:-1, first:first + n] = exact(a, b, out_dtype)
    wrong = buffer != want
    if wrong.any():
        at = (wrong.nonzero()[0] - torch.tensor([1, first], device="cuda")).tolist()
        pytest.fail(f"{what} {tuple(a.shape)} x {tuple(b.shape)}: {int(wrong.sum())} of {m * n} wrong, one at {at}")


@pytest.mark.parametrize("config", TILES, ids=lambda x: x.name)
@pytest.mark.parametrize("a_major, b_major", MAJORS)
@pytest.mark.sampled(when=lambda config, a_major, b_major: ((a_major, b_major) in (("k", "n"), ("m", "k"))) == (
    TILES.index(config) % 2 == 1))
def test_every_tile_and_order(config, a_major, b_major):
    for size in SIZES:
        check_run(*operands(size, a_major, b_major), config, what="tma")
    if (TILES.index(config) + MAJORS.index((a_major, b_major))) % 2:  # a store and an order have nothing in common
        return
    for size in ODD_SIZES:  # loads by TMA, results at odd addresses
        check_run(*operands(size, a_major, b_major), config, first=3, what="odd result")


OTHERS = {
    "not under the one before": Config(), "not held": Config(hold_in_registers=False),
    "narrow bands": Config(raster_group=3),
    "alone, not held": Config(cluster=1, hold_in_registers=False),
    "64 rows in a cluster": Config(m=64, n=128, stages=8), "two stages": Config(stages=2),
    "overlap_epilogue": Config(overlap_epilogue=1),
    "spread, 64 rows": Config(m=64, n=128, stages=8, cluster=1, overlap_epilogue=1),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("a_major, b_major", (("k", "n"), ("m", "k")))
@pytest.mark.sampled(when=lambda name, a_major: (a_major == "m") == (name in ("overlap_epilogue", "two stages"))
                     and name not in ("narrow bands", "alone, not held", "spread, 64 rows"))
def test_other_configurations(name, a_major, b_major):
    for size in SIZES:
        check_run(*operands(size, a_major, b_major), OTHERS[name], what=name)
    check_run(*operands((1500, 1800, 200), a_major, b_major), OTHERS[name], blocks=6, what=f"{name}, many tiles")


@pytest.mark.parametrize("out_dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize("config", TILES, ids=lambda x: x.name)
@pytest.mark.sampled(when=lambda config, out_dtype: (out_dtype == torch.float32) == (TILES.index(config) % 2 == 0))
def test_many_tiles_to_a_block(config, out_dtype):
    for steps, blocks in itertools.product((8, 64, 72, 640), (1, 5)):
        check_run(*operands((900, 1100, steps)), config, out_dtype, blocks=blocks, what=f"{blocks} blocks")
        check_run(*operands((900, 1104, steps)), config, out_dtype, blocks=blocks, what=f"{blocks} blocks, 16 bytes")
        check_run(*operands((500, 611, steps)), config, out_dtype, first=1, blocks=blocks, what=f"{blocks} blocks, odd")


@pytest.mark.parametrize("out_dtype", (torch.bfloat16, torch.float32))
def test_nothing_is_written_past_the_end_of_a_row(out_dtype):
    """Base and pitch are what TMA takes, but it would write whole units of 16 bytes."""
    for m, n in itertools.product((1, 2, 130), (1, 2, 4, 7, 12, 100, 257, 1100, 1102)):
        check_run(*operands((m, n, 72)), None, out_dtype, what=str(out_dtype))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("out_dtype", (torch.bfloat16, torch.float16, torch.float32))
@pytest.mark.sampled(each_value=True)
def test_types(dtype, out_dtype):
    for size in ((129, 264, 136), (512, 512, 512), (65, 1000, 72)):
        check_run(*operands(size, dtype=dtype), None, out_dtype)
        a, b = operands(size, dtype=dtype)
        c = tkq.gemm(a, b, out_dtype=out_dtype)
        assert c.dtype == out_dtype and c.is_contiguous() and torch.equal(c, exact(a, b, out_dtype))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("a_major, b_major", MAJORS)
@pytest.mark.sampled(when=lambda dtype, a_major, b_major: dtype == torch.bfloat16 or (a_major, b_major) == ("k", "n"))
def test_elements(dtype, a_major, b_major):
    """Bases and pitches that TMA does not take: all odd, or only one of them."""
    for size in (*ODD_SIZES, (200, 300, 264)):
        check_run(*operands(size, a_major, b_major, dtype, first=3, pad=2), first=5, what="odd")
        a, _ = operands(size, a_major, b_major, dtype)
        _, b = operands(size, a_major, b_major, dtype, first=1)
        check_run(a, b, what="odd b")
        a, _ = operands(size, a_major, b_major, dtype, pad=3)
        _, b = operands(size, a_major, b_major, dtype)
        check_run(a, b, what="odd pitch of a")


def test_views():
    a, b = operands((256, 512, 512))
    odd = torch.randint(-4, 5, (9, 67), device="cuda").to(a.dtype)[8:, :56]  # one row, aligned: its pitch says nothing
    for x, y in ((a[::3], b), (a[:, 8:72], b[8:72]), (a[5:6], b), (a[:, :64], b[:64, 3:4]), (a[:, 1:65], b[1:65]),
                 (a[:1], b[:, :1]), (b.t(), a.t()), (b[:, :1].t(), b), (a[:1].expand(70, -1), b),
                 (a, b[9:10].t().expand(-1, 40)), (b.t()[1:, :256], a), (a[:40], b[:, :511]),
                 (a, b[:, 0].clone()[:, None]), (a[:, :8].contiguous(), b[:8].clone()), (odd, b[:56]),
                 (a[:, :56], odd.t())):
        c = tkq.gemm(x, y)
        assert torch.equal(c, exact(x, y, c.dtype)), (x.shape, x.stride(), y.shape, y.stride())


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("size", ((64, 64, 64), (255, 1000, 4096), (1000, 257, 512), (4096, 4096, 4096),
                                  (127, 4096, 1000)))
@pytest.mark.sampled(when=lambda dtype, size: dtype == torch.bfloat16 or size == (1000, 257, 512))
def test_error(dtype, size):
    m, n, k = size
    g = torch.Generator("cuda").manual_seed(sum(size))
    a, b = (torch.randn(*s, device="cuda", generator=g).to(dtype) for s in ((m, k), (k, n)))
    truth = a.double() @ b.double()
    for x, y in ((a, b), (a.t().contiguous().t(), b), (a, b.t().contiguous().t())):
        assert_2x(tkq.gemm(x, y), truth, torch.matmul(a, b), 1, f"{size}")
    # fp32: the tensor cores cut off what they add, once every 16 of K
    peer = torch.mm(a, b, out_dtype=torch.float32)
    assert_2x(tkq.gemm(a, b, out_dtype=torch.float32), truth, peer, 2 + k / 32, f"{size} fp32")


def test_large_values_and_what_is_not_finite():
    a, b = operands((300, 520, 256), dtype=torch.float16)
    a, b = a.clone() * 2048, b.clone() * 8  # beyond 65504 here and there
    want = exact(a, b, torch.float16)
    assert torch.isinf(want).any() and torch.isfinite(want).any()
    assert torch.equal(tkq.gemm(a, b), want)
    assert torch.equal(tkq.gemm(a, b, out_dtype=torch.float32), exact(a, b, torch.float32))
    a[17, 3], b[200, 400] = math.inf, math.nan
    c, want = tkq.gemm(a, b, out_dtype=torch.float32), (a.double() @ b.double()).float()
    assert torch.equal(torch.isnan(c), torch.isnan(want)) and torch.equal(c.nan_to_num(), want.nan_to_num())
    big = torch.full((64, 64), 1e30, dtype=torch.bfloat16, device="cuda")
    assert torch.isinf(tkq.gemm(big, big)).all() and torch.isinf(tkq.gemm(big, big, out_dtype=torch.float32)).all()


@pytest.mark.parametrize("m, n, k", ((0, 8, 8), (8, 0, 8), (0, 0, 0), (5, 7, 0), (0, 3, 0)))
def test_empty(m, n, k):
    a, b = (torch.empty(*s, dtype=torch.bfloat16, device="cuda") for s in ((m, k), (k, n)))
    c = tkq.gemm(a, b)
    assert c.shape == (m, n) and c.dtype == torch.bfloat16 and not c.any()


@pytest.mark.parametrize("m", (5, 129))
def test_long_k(m):
    for a_major, b_major in (("k", "n"), ("k", "k")) if m == 5 else (("k", "n"), ("m", "k")):
        check_run(*operands((m, 264, 28672), a_major, b_major), what=f"{a_major}{b_major}")


@pytest.mark.parametrize("first", (0, 1))
def test_more_than_32_bits_of_elements(first):
    m, n = 65600, 32768 + 8
    a = torch.arange(m, device="cuda").remainder(253).to(torch.bfloat16)[:, None].repeat(1, 8)
    b = torch.zeros(8, n, dtype=torch.bfloat16, device="cuda")
    b[3] = torch.arange(n, device="cuda").remainder(2) + 1
    c = torch.full((m, n + 8), POISON, dtype=torch.bfloat16, device="cuda")[:, first:first + n]
    ops.run(a, b, c)
    for rows in (slice(0, 300), slice(m - 300, m), slice(m // 2, m // 2 + 300)):
        assert torch.equal(c[rows], a[rows, :1] * b[3])
    assert torch.equal(c.sum(dtype=torch.float64), a[:, 0].sum(dtype=torch.float64) * b[3].sum(dtype=torch.float64))


def test_graph_and_repeats():
    a, b = operands((1000, 1000, 512))
    first = tkq.gemm(a, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        c = tkq.gemm(a, b)
    for seed in (3, 4):
        a.copy_(whole(1000, 512, a.dtype, "r", seed=seed))
        c.fill_(math.nan)
        graph.replay()
        assert torch.equal(c, exact(a, b, c.dtype)) and not torch.equal(c, first)
    x, y = torch.randn_like(a.float()).to(a.dtype), torch.randn_like(b.float()).to(b.dtype)
    once = tkq.gemm(x, y)
    assert all(torch.equal(once, tkq.gemm(x, y)) for _ in range(5))


@pytest.mark.parametrize("captured", (False, True))
def test_launched_under_the_end_of_the_one_before(captured):
    size, config = 1024, Config(overlap_epilogue=1, pdl=True)
    first = torch.randn(size, size, device="cuda").to(torch.bfloat16)
    weights = [torch.linalg.qr(torch.randn(size, size, device="cuda"))[0].to(first.dtype) for _ in range(2)]
    check_back_and_forth(lambda *given: ops.run(*given, config), first, weights, 50, captured)


def test_side_stream():
    a, b = operands((512, 512, 512))
    tkq.gemm(a, b)  # compiled
    c = on_a_side_stream(lambda defer_activation: tkq.gemm(defer_activation, b), a)
    assert torch.equal(c, exact(a, b, c.dtype))


def test_under_compile():
    a, b = operands((129, 264, 136))
    f = torch.compile(lambda a, b: tkq.gemm(a, b, out_dtype=torch.float32) + 1, fullgraph=True, backend="eager")
    assert torch.equal(f(a, b), exact(a, b, torch.float32) + 1)
    torch.library.opcheck(torch.ops.tkq.gemm.default, (a, b, None, "", None, 1.0, 0.0, None))


@pytest.mark.parametrize("change, error, words", (
    (lambda a, b: (a, b.cpu()), ValueError, ("b", "cpu")),
    (lambda a, b: (a.float(), b), TypeError, ("a", "float32", "bfloat16")),
    (lambda a, b: (a, b.half()), TypeError, ("b", "float16", "bfloat16")),
    (lambda a, b: (a[None], b), ValueError, ("(1, 64, 64)", "(64, 64)", "(B, M, K)")),
    (lambda a, b: (a, b[:, 0]), ValueError, ("b", "1", "2")),
    (lambda a, b: (a, b[:56]), ValueError, ("(64, 64)", "(56, 64)", "(K, N)")),
    (lambda a, b: (a[:0], b[:56]), ValueError, ("(0, 64)", "(56, 64)", "(K, N)")),
    (lambda a, b: (a[:, :0], b), ValueError, ("(64, 0)", "(64, 64)", "(K, N)")),
    (lambda a, b: (a[:, :60], b[:60]), ValueError, ("K is 60", "multiples of 8")),
    (lambda a, b: (a[:, 1:61], b[1:61]), ValueError, ("K is 60", "multiples of 8")),
    (lambda a, b: (a.t().contiguous().t()[:, :60], b[:60]), ValueError, ("K is 60", "multiples of 8")),
    (lambda a, b: (a[:, ::2], b[:32]), ValueError, ("a", "strides", ".contiguous()")),
    (lambda a, b: (a, b[:, ::2]), ValueError, ("b", "strides")),
))
def test_bad_input_launches_nothing(change, error, words):
    a, b = operands((64, 64, 64))
    with pytest.raises(error) as caught:
        tkq.gemm(*change(a.clone(), b.clone()))
    assert all(w in str(caught.value) for w in words), str(caught.value)
    torch.cuda.synchronize()


@pytest.mark.parametrize("out_dtype", (torch.float64, torch.int32, "bf16"))
def test_bad_out_dtype_is_named(out_dtype):
    with pytest.raises(TypeError, match="out_dtype"):
        tkq.gemm(*operands((64, 64, 64)), out_dtype=out_dtype)
