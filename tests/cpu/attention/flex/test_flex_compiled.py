"""tkq.flex_attention under torch.compile and other tracers: what is recorded is what is traced, one graph, gradients,
nothing stale, dynamic shapes."""
import numpy
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import tkq
from tests.helpers.attention import flex_captures
from tests.helpers.attention import flex_gallery as gallery
from tkq import reference
from tkq.attention.flex.check import blocks_from, tensors_of
from tkq.attention.flex.functions import replay
from tkq.attention.flex.functions.derive import capture_slopes_of, slope_of
from tkq.attention.flex.functions.record import Recorded, record
from tkq.attention.flex.functions.trace import ARGUMENTS, trace
from tkq.reference.flex import places
from tkq.reference.graphs import evaluate

B, H, S = 2, 3, 144
GALLERY = gallery.gallery(B, H, S, "cpu")
TABLE, FLAGS, SMALL = torch.randn(7, S), torch.arange(S) % 3 == 0, torch.arange(S).to(torch.int8) % 5
FUNCTIONS = {**{f"{name} {kind}": (kind, function) for name, both in GALLERY.items() for kind, function in zip(
    ("score_mod", "mask_mod"), both) if function is not None},
             **{name: ("score_mod", function) for name, function in gallery.operations(TABLE, FLAGS, SMALL).items()}}


def recorded(name, function):
    return replay.traced(name, record(function, ARGUMENTS[name], torch.device("cpu")))


@pytest.mark.parametrize("of", FUNCTIONS)
def test_recorded_as_traced(of):
    """The same values. The same graph, but for numbers, which the text has as constants, and slices, which are captured
    as they are."""
    name, function = FUNCTIONS[of]
    known, found = trace(name, function), recorded(name, function)
    at = {**places(B, H, 40, 50, "cpu"), "score": torch.randn(B, H, 40, 50)}
    torch.testing.assert_close(evaluate(*found, at), evaluate(*known, at), rtol=1e-6, atol=1e-6)
    assert not found.numbers
    if not known.numbers and of != "other":
        assert found.graph == known.graph and all(map(torch.equal, found.tensors, known.tensors))


def test_names_of_operators():
    """As Dynamo and torch.export have them, beside numbers on either side."""
    text = """v5 = sub(1, v0)
v6 = truediv(v5, 3)
v7 = floordiv(v3, 2)
v8 = and_(ge(v7, 2), invert(lt(v4, 5)))
v9 = __rsub__(v6, 2.0)
v10 = where(v8, v9, -inf)
v11 = add(v10, pow(2.0, v1), alpha=2)
result = v11"""
    found = replay.traced("score_mod", Recorded(text, [], []))
    wanted = trace("score_mod", lambda s, b, h, q, kv: torch.where(
        (q // 2 >= 2) & ~(kv < 5), 2.0 - (1 - s) / 3, -torch.inf) + 2.0 ** b * 2)
    at = {**places(B, H, 40, 50, "cpu"), "score": torch.randn(B, H, 40, 50)}
    torch.testing.assert_close(evaluate(*found, at), evaluate(*wanted, at))


def test_numbers_of_numpy_and_arguments_by_name():
    n, x = numpy.int64(3), numpy.float64(0.1)
    found = recorded("score_mod", lambda s, b, h, q, kv: torch.add(input=s * x, other=kv % n))
    at = {**places(1, 1, 5, 7, "cpu"), "score": torch.randn(1, 1, 5, 7)}
    torch.testing.assert_close(evaluate(*found, at), at["score"] * 0.1 + at["kv"] % 3)


def test_what_no_mode_sees_is_refused():
    """Dynamo computes abs(x) past all modes: what comes of it is a tensor on the meta device that nobody knows."""
    unseen = torch.zeros((), device="meta")
    with pytest.raises(NotImplementedError, match="x.abs"):
        recorded("score_mod", lambda s, b, h, q, kv: s + unseen)


def make(rows=S, dim=64):
    return [torch.randn(B, H, rows, dim, generator=torch.Generator().manual_seed(i)).bfloat16().requires_grad_()
            for i in range(3)]


def same(found, wanted):
    for a, b in zip(found, wanted):
        assert a.dtype == b.dtype and (a.double() - b.double()).norm() <= 2e-2 * b.double().norm()


def gradients(call, *args, leaves):
    o = call(*args)
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(9))
    return (o, *torch.autograd.grad(o, leaves, do.to(o.dtype)))


def test_gradients():
    """Also of captured tensors: of a leaf, of a result of the compiled program."""
    slopes, weight = torch.rand(H, requires_grad=True), torch.randn(B, H, requires_grad=True)
    mask = create_block_mask(gallery.causal, None, None, S, S, "cpu", 64)

    def block(q, k, v, weight, mask):
        bias = weight.exp().sum(0)
        return tkq.flex_attention(q * 2, k, v, lambda s, b, h, q, kv: s + slopes[h] * (kv - q) + bias[h] * (kv % 5)
                                  + weight[b, h] * (kv % 3), mask) + 1

    torch._dynamo.reset()
    given = (*make(), weight, mask)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    leaves = *given[:4], slopes
    same(gradients(compiled, *given, leaves=leaves), gradients(block, *given, leaves=leaves))


def test_nothing_is_served_stale():
    """Cells with numbers and tensors, tensors by their values, globals, the mask's function."""
    window, slopes = 5, torch.rand(H)
    mask = create_block_mask(gallery.sliding_window(9), None, None, S, S, "cpu", 64)

    def score_mod(s, b, h, q, kv):
        return torch.where(q - kv < window, s * SCALE, s) + slopes[h]

    block = lambda q, k, v, mask: tkq.flex_attention(q, k, v, score_mod, mask)
    torch._dynamo.reset()
    compiled, given = torch.compile(block, fullgraph=True, backend="eager"), make()
    check = lambda mask: same([compiled(*given, mask)], [block(*given, mask)])
    check(mask)
    window = 50
    check(mask)
    slopes = torch.rand(H) + 2
    check(mask)
    slopes.mul_(-1)
    check(mask)
    globals()["SCALE"] = -1.0
    check(mask)
    globals()["SCALE"] = 2.0
    check(create_block_mask(gallery.sliding_window(100), None, None, S, S, "cpu", 64))


SCALE = 2.0


def test_one_graph_for_all_lengths():
    """A captured number and a captured tensor follow the length."""
    count = 0

    def counted(graph, _):
        nonlocal count
        count += 1
        return graph.forward

    def block(q, k, v, table):
        rows = q.shape[2]
        return tkq.flex_attention(q, k, v, lambda s, b, h, q, kv: s + table[q - kv + rows - 1])

    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=counted)
    for rows in (40, 72, 56):
        given = (*make(rows), torch.randn(2 * rows - 1))
        same([compiled(*given)], [block(*given)])
    assert count == 1


def test_lse_and_autocast():
    q, k, v = (x.detach() for x in make())
    call = lambda q, k, v: tkq.flex_attention(q, k, v, gallery.softcap(5.0), return_lse=True)
    torch._dynamo.reset()
    with torch.autocast("cpu", torch.bfloat16):
        same(torch.compile(call, fullgraph=True, backend="eager")(q.float(), k, v), call(q, k, v))


def test_what_is_refused():
    q, k, v = (x.detach() for x in make())
    run = lambda score_mod: torch.compile(
        lambda q: tkq.flex_attention(q, k, v, score_mod), fullgraph=True, backend="eager")(q)
    torch._dynamo.reset()
    with pytest.raises(NotImplementedError, match="aten.lgamma, which no kernel has"):
        run(lambda s, b, h, q, kv: torch.lgamma(s))
    with pytest.raises(Exception, match="is on meta, expected cpu"):
        run(gallery.alibi(torch.empty(H, device="meta")))
    with pytest.raises(Exception, match="score_mod is 3"):
        run(3)


@pytest.mark.slow
def test_a_function_that_looks_at_values():
    """Where torch.compile may break the graph: refused as it is without."""
    q, k, v = (x.detach() for x in make())
    torch._dynamo.reset()
    with pytest.raises(NotImplementedError, match="torch.where in the place of if"):
        torch.compile(lambda q: tkq.flex_attention(q, k, v, lambda s, b, h, q, kv: s if q > kv else -s),
                      backend="eager")(q)


def test_exported():
    """By torch.export, without Dynamo too: the tensors that functions capture are the program's."""
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.slopes = torch.nn.Parameter(torch.rand(H))

        def forward(self, q, k, v):
            rows = q.shape[2]
            return tkq.flex_attention(q, k, v, lambda s, b, h, q, kv: s + self.slopes[h] * (kv - q) / rows)

    block, given = Block(), [x.detach() for x in make()]
    rows = torch.export.Dim("rows", min=8, max=1024)
    for strict in (False, True):
        program = torch.export.export(block, tuple(given), strict=strict, dynamic_shapes=({2: rows},) * 3).module()
        for some in (given, [x.detach() for x in make(40)]):
            same([program(*some)], [block(*some)])


@pytest.mark.parametrize("name", flex_captures.functions(H, 24, "cpu"))
def test_formulas_of_the_cpu_op(name):
    """The op's gradients on the CPU, which are formulas, against autograd's, in float64."""
    of, learned = flex_captures.functions(H, 24, "cpu")[name]
    q, k, v = (x.detach().double().requires_grad_() for x in make(24))
    k, v = (x.detach()[:, :1].requires_grad_() for x in (k, v))
    mask = create_block_mask(lambda b, h, q, kv: (q >= kv) & (q > 3), None, None, 24, 24, "cpu", 64)
    tensors = tensors_of(mask, q, k)
    score, of_mask = trace("score_mod", of(*learned)), trace("mask_mod", mask.mask_mod)
    call = q, k, v, score, of_mask, blocks_from(tensors, q, k), 0.1
    o, lse = reference.flex.flex_attention(*call, torch.float64)
    g = torch.Generator().manual_seed(9)
    do, dlse = torch.randn(o.shape, generator=g).double(), torch.randn(lse.shape, generator=g)
    wanted = torch.autograd.grad((o, lse), (q, k, v, *learned), (do, dlse.masked_fill(lse == -torch.inf, 0)))
    slots = tuple(i for i, x in enumerate(score.tensors) if x.requires_grad)
    with torch.no_grad():
        *found, captured = reference.flex.flex_attention_backward(
            call, (do, o, lse, dlse), slope_of(score).as_function(),
            (capture_slopes_of(score, slots), [score.tensors[i] for i in slots]), torch.float64)
    for a, b in zip(found, wanted):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    where = {id(score.tensors[i]): x for i, x in zip(slots, captured)}
    for x, b in zip(learned, wanted[3:]):
        torch.testing.assert_close(where[id(x)], b, rtol=1e-2, atol=1e-3)
