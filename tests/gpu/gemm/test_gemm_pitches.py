"""gemm of operands and results that begin anywhere and have rows of any pitch, on a GPU: what lies behind a row is NaN,
whole numbers are exact, and nothing beside the result is written."""
import itertools
import math

import pytest
import torch

import tkq
from bench.core.pitches import PLAIN, TURNED, Lies
from tkq.gemm.dense import launch, realigned
from tkq.gemm.dense.realign_config import RealignSpec
from tkq.runtime import Recipe, function

BF16, POISON = torch.bfloat16, -77.0
LIES = (Lies(1), Lies(8, 1), Lies(3, 5), Lies(1, 1, True), Lies(6, 2, True))


def numbers(lies, rows, cols, batches=0, seed=0, dtype=BF16):
    g = torch.Generator("cuda").manual_seed(seed + rows + cols)
    x = lies.make(rows, cols, batches)
    x.copy_(torch.randint(-4, 5, x.shape, device="cuda", generator=g))
    return x if dtype is BF16 else x.view(dtype).copy_(x.float())


def check(a, b, out_lies=None, out_dtype=None, what="", **more):
    """Through the function, into its own result or into one that lies so, twice: planned, and as seen before."""
    want = (a.double() @ b.double()).to(out_dtype or a.dtype)
    for _ in range(3):
        if out_lies is None:
            got = tkq.gemm(a, b, out_dtype=out_dtype, **more)
            assert got.is_contiguous() and torch.equal(got, want), what
            continue
        out = out_lies.make(*want.shape[-2:], want.shape[0] if want.dim() == 3 else 0, POISON)
        around = out.as_strided((out.untyped_storage().nbytes() // 2,), (1,), 0)
        expected = around.clone()
        expected.as_strided(out.shape, out.stride(), out.storage_offset()).copy_(want)
        assert tkq.gemm(a, b, out=out, **more) is out
        assert torch.equal(around, expected), what


@pytest.mark.parametrize("size", ((1024, 1024, 1024), (1000, 1001, 1096), (130, 3000, 2048), (2048, 65, 4096)))
def test_operands_anywhere(size):
    m, n, k = size
    for a_lies, b_lies in (*itertools.product(LIES, (PLAIN, TURNED)), *itertools.product((PLAIN, TURNED), LIES),
                           *zip(LIES, LIES[1:] + LIES[:1])):
        check(numbers(a_lies, m, k), numbers(b_lies, k, n, seed=1), what=f"{size} {a_lies} {b_lies}")


@pytest.mark.parametrize("size", ((1024, 1024, 1024), (1000, 1001, 1096), (130, 3001, 2048), (300, 7, 64),
                                  (16, 513, 512)))
def test_results_anywhere(size):
    m, n, k = size
    for out, b in itertools.product((Lies(1), Lies(8, 1), Lies(3, 5), Lies(0, 3)), (PLAIN, TURNED)):
        check(numbers(PLAIN, m, k), numbers(b, k, n, seed=1), out, what=f"{size} {b} {out}")
        check(numbers(Lies(1, 1), m, k), numbers(b, k, n, seed=1), out, what=f"{size} odd a {b} {out}")


def test_the_gradient_of_a_head_with_a_vocabulary_that_is_not_padded():
    """Finding 12, with fewer rows."""
    logits, w = numbers(PLAIN, 256, 50257), numbers(PLAIN, 50257, 1024, seed=1)
    logits[:, 50256], w[50256] = math.nan, math.nan
    check(logits[:, :50256], w[:50256], what="head")


@pytest.mark.parametrize("b", (PLAIN, TURNED))
def test_batches(b):
    for a_lies, out in itertools.product((Lies(1), Lies(8, 1), PLAIN), (None, Lies(1), Lies(3, 1))):
        check(numbers(a_lies, 512, 512, 5), numbers(b, 512, 520, 5, seed=1), out, what=f"{a_lies} {out}")
    shared = numbers(Lies(1, 1), 512, 512).expand(5, -1, -1)
    check(shared, numbers(b, 512, 513, 5, seed=1), None, what="one a")
    check(numbers(Lies(3), 512, 512, 5), numbers(b, 512, 520).expand(5, -1, -1), Lies(1), what="one b")


def test_an_epilogue_behind_copies():
    m, n, k = 1024, 1032, 1024
    for first in (0, 1):
        a, b, bias = numbers(Lies(1, first), m, k), numbers(PLAIN, k, n, seed=1), numbers(PLAIN, 1, n, seed=2)[0]
        c = numbers(Lies(1, 1), m, n, seed=3)
        want = torch.relu(2 * (a.double() @ b.double()) - c.double() + bias.double()).to(BF16)
        for out in (None, c):  # the last writes over c
            got = tkq.gemm(a, b, bias=bias, activation="relu", c=c, alpha=2.0, beta=-1.0, out=out)
            assert torch.equal(got, want)
        gate = tkq.gemm(a, b, activation="swiglu")
        near = a.float() @ b.float()
        near = torch.nn.functional.silu(near[:, :n // 2]) * near[:, n // 2:]
        assert torch.allclose(gate.float(), near, rtol=0.02, atol=0.5)


@pytest.mark.parametrize("out_dtype", (torch.float16, torch.float32))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_other_types(dtype, out_dtype):
    for lies in (Lies(1), Lies(8, 1)):
        check(numbers(lies, 1000, 1024, dtype=dtype), numbers(lies, 1024, 999, seed=1, dtype=dtype), None, out_dtype)


@pytest.mark.parametrize("rows, outputs", ((700, 1001), (701, 3000), (33, 50257), (5, 7), (1, 9), (9, 1)))
def test_gradients_of_odd_sizes(rows, outputs):
    """Inner sizes that are no multiples of 8, operands contiguous along them; a gradient with rows of any pitch."""
    for more in (0, 1):
        x, w = (numbers(PLAIN, *s, seed=i).requires_grad_() for i, s in enumerate(((rows, 520), (outputs, 520))))
        y = tkq.gemm(x, w.t())
        dy = numbers(Lies(more), rows, outputs, seed=3)
        found = torch.autograd.grad(y, (x, w), dy)
        for got, want in zip(found, (dy.double() @ w.detach().double(), dy.double().t() @ x.detach().double())):
            assert torch.equal(got, want.to(BF16)), (rows, outputs, more)


def test_in_a_graph_and_compiled():
    a, b = numbers(Lies(1, 1), 1024, 1024), numbers(PLAIN, 1024, 1024, seed=1)
    tkq.gemm(a, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        c = tkq.gemm(a, b)
    for seed in (5, 6):
        a.copy_(numbers(PLAIN, 1024, 1024, seed=seed))
        c.fill_(math.nan)
        graph.replay()
        assert torch.equal(c, (a.double() @ b.double()).to(BF16))
    compiled = torch.compile(lambda a, b: tkq.gemm(a, b) + 0, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(a, b), tkq.gemm(a, b))


def test_which_operand_is_odd_is_part_of_what_a_call_looks_like():
    """The same strides and dtypes, and once a, once b at an odd address."""
    even, odd = numbers(Lies(8), 1024, 1024), numbers(Lies(8, 1), 1024, 1024, seed=7)
    for a, b in ((even, odd), (odd, even), (odd, odd), (even, even)) * 2:
        assert torch.equal(tkq.gemm(a, b), (a.double() @ b.double()).to(BF16))


def test_the_memory_of_copies_is_free_again():
    a, b = numbers(Lies(1), 2048, 4096), numbers(PLAIN, 4096, 1024, seed=1)
    out = torch.empty(2048, 1024, dtype=BF16, device="cuda")
    tkq.gemm(a, b, out=out)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    tkq.gemm(a, b, out=out)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() - before <= a.numel() * 2 + 4096


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize("rows, cols", ((1, 1), (3, 7), (5, 64), (100, 4099), (3000, 257)))
def test_the_copies_alone(dtype, rows, cols):
    """One matrix, and two in one launch."""
    name, each = {BF16: "bf16", torch.float32: "fp32"}[dtype], 16 // dtype.itemsize
    one, two = (function(Recipe("tkq.gemm.dense.realign:Realign", (RealignSpec(name, both),)))
                for both in (False, True))
    for first, more in itertools.product(range(each), (0, 1, 5)):
        given, rooms = [], []
        for height in (rows, 2 * rows + 1):
            x = torch.full((first + 2 * (height * (cols + more) + 4),), math.nan, dtype=dtype, device="cuda")
            src = x.as_strided((2, height, cols), (height * (cols + more) + 3, cols + more, 1), first)
            given.append(src.copy_(torch.randint(-99, 99, src.shape, device="cuda")))
            rooms.append(torch.full((2, height, -(-cols // each) * each + each), POISON, dtype=dtype, device="cuda"))
        one(given[0], rooms[0][..., :-each], None, None)
        alone = rooms[0].clone()
        rooms[0].fill_(POISON)
        two(given[0], rooms[0][..., :-each], given[1], rooms[1][..., :-each])
        assert torch.equal(alone, rooms[0])
        for src, room in zip(given, rooms):
            assert torch.equal(room[..., :cols], src) and not room[..., cols:-each].any()
            assert (room[..., -each:] == POISON).all()


def test_small_products_read_element_by_element():
    """Where a copy would take longer, nothing is allocated."""
    a, b = numbers(Lies(1), 64, 64), numbers(PLAIN, 64, 64, seed=1)
    launched = launch.run(a, b, torch.empty(64, 64, dtype=BF16, device="cuda"))
    assert not isinstance(launched[0], realigned.Realigned)
    large = launch.run(numbers(Lies(1), 2048, 2048), numbers(PLAIN, 2048, 2048), torch.empty(2048, 2048, dtype=BF16,
                                                                                           device="cuda"))
    assert isinstance(large[0], realigned.Realigned)
