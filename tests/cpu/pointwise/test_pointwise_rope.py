"""rope where no GPU is needed: what it means, its gradient, in place, what it refuses."""
import pytest
import torch

import tkq
from tkq.reference import pointwise as reference
from tkq.testing import assert_2x

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def turned_one_by_one(x, angles, interleaved=False):
    """x (S, H, D) by angles (S, R / 2): each pair as a complex number, times exp(i angle)."""
    out, half = x.clone(), angles.shape[-1]
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        turned = torch.complex(x[..., a], x[..., b]) * torch.polar(torch.ones_like(angles), angles)[:, i, None]
        out[..., a], out[..., b] = turned.real, turned.imag
    return out


def angles_of(positions, dim, base=10000.0):
    frequencies = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    return positions.double()[:, None] * frequencies


def table(rows, dim, dtype=torch.float64):
    angles = angles_of(torch.arange(rows), dim)
    return angles.cos().to(dtype), angles.sin().to(dtype)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("D, R", [(8, 8), (10, 6), (7, 4), (3, 2)])
def test_the_reference_turns_complex_numbers(interleaved, D, R):
    x = torch.randn(2, 5, 3, D, dtype=torch.float64)
    for offset in (0, 4):
        y = reference.rope(x, *table(11, R), offset, interleaved=interleaved)
        for b in range(2):
            want = turned_one_by_one(x[b], angles_of(torch.arange(5) + offset, R), interleaved)
            torch.testing.assert_close(y[b], want)
        assert torch.equal(y[..., R:], x[..., R:])


def test_it_is_what_transformers_does():
    """x cos + rotate_half(x) sin, with tables (B, S, D) whose halves are equal, heads before tokens."""
    cos, sin = (torch.cat((t, t), -1) for t in table(16, 8, torch.float32))
    ids = torch.tensor([[3, 4, 5], [0, 9, 15]])
    cos, sin = cos[ids], sin[ids]  # (B, S, D)
    q = torch.randn(2, 4, 3, 8)  # (B, H, S, D)
    half = torch.cat((-q[..., 4:], q[..., :4]), -1)
    want = q * cos[:, None] + half * sin[:, None]
    got = tkq.rope(q.transpose(1, 2), cos[..., :4], sin[..., :4]).transpose(1, 2)
    torch.testing.assert_close(got, want)
    again = tkq.rope(q.transpose(1, 2), *table(16, 8, torch.float32), position_ids=ids)
    torch.testing.assert_close(again.transpose(1, 2), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("table_dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 5, 3, 8), (1, 1, 1, 2), (0, 4, 2, 8), (2, 0, 2, 8), (2, 4, 0, 8)])
def test_cpu_tensors_take_the_reference(dtype, table_dtype, shape):
    x, (cos, sin) = torch.randn(shape).to(dtype), table(9, shape[-1], table_dtype)
    y = tkq.rope(x, cos, sin)
    assert y.shape == x.shape and y.dtype == dtype and y.is_contiguous()
    truth = reference.rope(x.double(), cos.double(), sin.double())
    assert_2x(y, truth, reference.rope(x.float(), cos.float(), sin.float()).to(dtype), ulps=1)


def test_positions_of_every_kind():
    cos, sin = tkq.rope_cos_sin(64, 8, device="cpu")
    x = torch.randn(3, 6, 2, 8)
    starts = torch.tensor([7, 0, 20])
    ids = starts[:, None] + torch.arange(6)
    want = torch.stack([tkq.rope(x[b:b + 1], cos, sin, seqlen_offsets=int(starts[b]))[0] for b in range(3)])
    for index in (torch.int32, torch.int64):
        assert torch.equal(tkq.rope(x, cos, sin, seqlen_offsets=starts.to(index)), want)
        assert torch.equal(tkq.rope(x, cos, sin, position_ids=ids.to(index)), want)
    assert torch.equal(tkq.rope(x, cos[ids], sin[ids]), want)
    same = tkq.rope(x, cos, sin, seqlen_offsets=20)
    for form in (ids[2], ids[2:]):
        assert torch.equal(tkq.rope(x, cos, sin, position_ids=form), same)
    assert torch.equal(tkq.rope(x, cos[None, 20:26], sin[None, 20:26]), same)


@pytest.mark.parametrize("lengths", [(5,), (3, 0, 4), (1, 1, 1, 7), (0, 6, 0)])
@pytest.mark.parametrize("before, after", [(0, 0), (2, 3)])
def test_sequences_of_several_lengths(lengths, before, after):
    """Each as if it were alone; tokens of no sequence come through as they are."""
    ends = torch.tensor([0, *lengths]).cumsum(0).int() + before
    total = int(ends[-1]) + after
    x, (cos, sin) = torch.randn(total, 2, 8), tkq.rope_cos_sin(32, 8, device="cpu")
    offsets = torch.arange(len(lengths)) * 3
    y = tkq.rope(x, cos, sin, cu_seqlens=ends, max_seqlen=max(lengths))
    z = tkq.rope(x, cos, sin, cu_seqlens=ends, seqlen_offsets=offsets)
    for b, (first, last) in enumerate(zip(ends[:-1].tolist(), ends[1:].tolist())):
        alone = x[None, first:last]
        assert torch.equal(y[first:last], tkq.rope(alone, cos, sin)[0])
        assert torch.equal(z[first:last], tkq.rope(alone, cos, sin, seqlen_offsets=3 * b)[0])
    for outside in (slice(0, before), slice(total - after, total)):
        assert torch.equal(y[outside], x[outside])
    places = torch.cat([torch.arange(n) for n in lengths])
    inside = slice(before, total - after)
    assert torch.equal(tkq.rope(x[inside], cos, sin, position_ids=places), y[inside])


def test_a_position_outside_the_table_gives_nan():
    cos, sin = tkq.rope_cos_sin(8, 4, device="cpu")
    x = torch.randn(1, 3, 2, 6)
    for bad in (8, -1, 1 << 40):
        y = tkq.rope(x, cos, sin, position_ids=torch.tensor([[0, bad, 7]]))
        assert torch.isnan(y[0, 1, :, :4]).all() and not torch.isnan(y[0, ::2]).any()
        assert torch.equal(y[..., 4:], x[..., 4:])


# ---- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
def test_turning_back_is_the_gradient(interleaved):
    x = torch.randn(2, 5, 3, 10, dtype=torch.float64, requires_grad=True)
    cos, sin = (torch.randn(9, 4, dtype=torch.float64) for _ in range(2))  # no rotation: the formula is still right
    dy = torch.randn_like(x)
    want, = torch.autograd.grad(reference.rope(x, cos, sin, 2, interleaved=interleaved), x, dy)
    got = reference.rope(dy, cos, sin, 2, interleaved=interleaved, inverse=True)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("more", [{}, dict(seqlen_offsets=3), dict(interleaved=True),
                                  dict(position_ids=torch.tensor([[4, 2, 0, 1, 3]]))])
def test_autograd(compiled, more):
    cos, sin = tkq.rope_cos_sin(16, 8, device="cpu")
    q, k = torch.randn(2, 5, 3, 8, requires_grad=True), torch.randn(2, 5, 1, 8, requires_grad=True)

    def call(q, k):
        a, b = tkq.rope_qk(q, k, cos, sin, **more)
        return tkq.rope(q, cos, sin, **more) * 2 + a, b

    def want(q, k):
        options = dict(more)
        options["offset"] = options.pop("seqlen_offsets", 0)
        return 3 * reference.rope(q, cos, sin, **options), reference.rope(k, cos, sin, **options)

    if compiled:
        torch._dynamo.reset()
    run = torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call
    dq, dk = torch.randn(2, 3, 5, 8).transpose(1, 2), torch.randn(())
    for outputs, grads, inputs in ((0, 2, (q, k)), (0, 1, (q,)), (1, 2, (k,))):
        grad = (dq, dk.expand(2, 5, 1, 8))[outputs:grads]
        expected = torch.autograd.grad(want(q, k)[outputs:grads], inputs, grad)
        got = torch.autograd.grad(run(q, k)[outputs:grads], inputs, grad)
        for mine, theirs in zip(got, expected):
            torch.testing.assert_close(mine, theirs)


def test_gradients_with_several_lengths():
    cos, sin = tkq.rope_cos_sin(16, 8, device="cpu")
    x, ends = torch.randn(9, 2, 8, requires_grad=True), torch.tensor([1, 4, 4, 8], dtype=torch.int32)
    dy = torch.randn_like(x)
    want, = torch.autograd.grad(reference.rope(x, cos, sin, cu_seqlens=ends), x, dy)
    got, = torch.autograd.grad(tkq.rope(x, cos, sin, cu_seqlens=ends), x, dy)
    torch.testing.assert_close(got, want)


def test_only_the_gradient_that_is_needed():
    cos, sin = tkq.rope_cos_sin(16, 8, device="cpu")
    q, k = torch.randn(2, 5, 3, 8, requires_grad=True), torch.randn(2, 5, 1, 8)
    a, b = tkq.rope_qk(q, k, cos, sin)
    (a.sum() + b.sum()).backward()
    assert q.grad is not None and k.grad is None


# ---- in place --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("x", [torch.zeros(2, 9, 1, 64).expand(2, 9, 6, 64),
                               torch.zeros(2, 9, 100).unfold(2, 64, 12)], ids=["expanded", "unfolded"])
def test_what_shares_memory_is_not_turned_in_place(x):
    cos, sin = tkq.rope_cos_sin(9, 64)
    with pytest.raises(ValueError, match="rope: x: is .* share memory; not allowed in place"):
        tkq.rope(x, cos, sin, inplace=True)


def test_in_place_on_a_slice_of_qkv():
    cos, sin = tkq.rope_cos_sin(16, 6, device="cpu")
    qkv = torch.randn(2, 5, 9, 8)
    before = qkv.clone()
    heads = qkv[:, :, :6]
    assert tkq.rope(heads, cos, sin, inplace=True) is heads
    assert torch.equal(qkv[:, :, :6], tkq.rope(before[:, :, :6], cos, sin))
    assert torch.equal(qkv[:, :, 6:], before[:, :, 6:])


@pytest.mark.parametrize("compiled", [False, True])
def test_in_place_under_autograd(compiled):
    """Through a view of what is written, and with another use of the tensor before."""
    cos, sin = tkq.rope_cos_sin(16, 8, device="cpu")
    x = torch.randn(2, 5, 6, 8, requires_grad=True)

    def ours(x):
        qkv = x * 2
        total = qkv.sum()
        tkq.rope(qkv[:, :, 1:3], cos, sin, inplace=True)
        return (qkv * torch.arange(8.0)).sum() + total

    def theirs(x):
        qkv = x * 2
        total = qkv.sum()
        qkv = torch.cat((qkv[:, :, :1], reference.rope(qkv[:, :, 1:3], cos, sin), qkv[:, :, 3:]), 2)
        return (qkv * torch.arange(8.0)).sum() + total

    run = torch.compile(ours, backend="aot_eager", fullgraph=True) if compiled else ours
    got, want = run(x), theirs(x)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*(torch.autograd.grad(y, x)[0] for y in (got, want)))


def test_autograd_notices_what_was_overwritten():
    cos, sin = tkq.rope_cos_sin(16, 8, device="cpu")
    x = torch.randn(1, 4, 2, 8, requires_grad=True)
    for grad in (True, False):
        y = x * 1
        z = y.square()  # keeps y for its backward
        with torch.set_grad_enabled(grad):
            tkq.rope(y, cos, sin, inplace=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()


def test_a_leaf_is_not_overwritten():
    cos, sin = tkq.rope_cos_sin(16, 8, device="cpu")
    x = torch.randn(1, 4, 2, 8, requires_grad=True)
    before = x.detach().clone()
    for target in (x, x[:, 1:]):
        with pytest.raises(RuntimeError, match="leaf that requires a gradient"):
            tkq.rope(target, cos, sin, inplace=True)
    assert torch.equal(x, before)
    with torch.no_grad():
        tkq.rope(x, cos, sin, inplace=True)
    assert not torch.equal(x, before)


@pytest.mark.parametrize("views", [lambda t: t.split(3, 2)[0], lambda t: t.unbind(0)[1][None], lambda t: t.chunk(2)[1]])
def test_a_view_that_autograd_protects_is_not_overwritten(views):
    cos, sin = tkq.rope_cos_sin(16, 8, device="cpu")
    packed = torch.randn(2, 4, 6, 8, requires_grad=True) * 1
    before = packed.detach().clone()
    with pytest.raises(RuntimeError, match="rope: x is one of several views"):
        tkq.rope(views(packed), cos, sin, inplace=True)
    assert torch.equal(packed, before)
    with torch.no_grad():
        tkq.rope(views(packed), cos, sin, inplace=True)
    assert not torch.equal(packed, before)


def test_in_place_in_inference_mode():
    cos, sin = tkq.rope_cos_sin(16, 8, device="cpu")
    with torch.inference_mode():
        x = torch.randn(1, 4, 2, 8)
        want = tkq.rope(x, cos, sin)
        assert torch.equal(tkq.rope(x, cos, sin, inplace=True), want)


# ---- refusals --------------------------------------------------------------------------------------------------------

X, COS, IDS = torch.zeros(2, 5, 3, 8), torch.zeros(9, 4), torch.zeros(2, 5).int()
FLAT, STARTS = X.flatten(0, 1), torch.tensor([0, 4, 10], dtype=torch.int32)


@pytest.mark.parametrize("error, says, call", [
    (TypeError, "x: got str", lambda: tkq.rope("x", COS, COS)),
    (TypeError, "x: dtype is torch.float64", lambda: tkq.rope(X.double(), COS, COS)),
    (TypeError, "cos: got list", lambda: tkq.rope(X, [1.0], COS)),
    (TypeError, "sin: dtype is torch.int64", lambda: tkq.rope(X, COS, COS.long())),
    (ValueError, r"sin is \(9, 4\) torch.float16", lambda: tkq.rope(X, COS, COS.half())),
    (ValueError, r"sin is \(8, 4\)", lambda: tkq.rope(X, COS, COS[:8])),
    (ValueError, "x: has 2 dimensions", lambda: tkq.rope(X[0, 0], COS, COS)),
    (ValueError, "x: strides are", lambda: tkq.rope(X.transpose(2, 3), COS, COS)),
    (ValueError, "cos: strides are", lambda: tkq.rope(X, COS.t().contiguous().t(), COS)),
    (ValueError, "cos: has 1 dimensions", lambda: tkq.rope(X, COS[0], COS[0])),
    (ValueError, "cos: has 0 dimensions",
     lambda: tkq.rope(FLAT, COS[0, 0], COS[0, 0], cu_seqlens=STARTS, max_seqlen=3)),
    (ValueError, "cos: last dimension is 5, allowed are 1 to 4", lambda: tkq.rope(X, *[torch.zeros(9, 5)] * 2)),
    (NotImplementedError, "cos: last dimension is 2049, supported are up to 2048",
     lambda: tkq.rope(torch.zeros(1, 2, 1, 4098), *[torch.zeros(2, 2049)] * 2)),
    (ValueError, r"pass cos\[..., :R // 2\]", lambda: tkq.rope(X, *[torch.zeros(9, 8)] * 2)),
    (ValueError, "cos: has 4 rows; 5 tokens from position 0 need 5", lambda: tkq.rope(X, COS[:4], COS[:4])),
    (ValueError, "5 tokens from position 5 need 10", lambda: tkq.rope(X, COS, COS, seqlen_offsets=5)),
    (ValueError, "seqlen_offsets: got -1", lambda: tkq.rope(X, COS, COS, seqlen_offsets=-1)),
    (TypeError, "seqlen_offsets: got float", lambda: tkq.rope(X, COS, COS, seqlen_offsets=1.5)),
    (TypeError, "seqlen_offsets: dtype", lambda: tkq.rope(X, COS, COS, seqlen_offsets=torch.zeros(2))),
    (ValueError, r"seqlen_offsets: shape is \(3,\), expected \(2\)",
     lambda: tkq.rope(X, COS, COS, seqlen_offsets=torch.zeros(3).int())),
    (TypeError, "position_ids: got list", lambda: tkq.rope(X, COS, COS, position_ids=[1, 2])),
    (TypeError, "seqlen_offsets: got list", lambda: tkq.rope(X, COS, COS, seqlen_offsets=[1, 2])),
    (TypeError, "position_ids: dtype", lambda: tkq.rope(X, COS, COS, position_ids=IDS.float())),
    (ValueError, r"position_ids: shape is \(5, 2\)", lambda: tkq.rope(X, COS, COS, position_ids=IDS.t())),
    (ValueError, r"position_ids: shape is \(2, 1\)", lambda: tkq.rope(X, COS, COS, position_ids=IDS[:, :1])),
    (ValueError, "position_ids and seqlen_offsets",
     lambda: tkq.rope(X, COS, COS, position_ids=IDS, seqlen_offsets=1)),
    (ValueError, "a row for each token and position_ids",
     lambda: tkq.rope(X, *[torch.zeros(2, 5, 4)] * 2, position_ids=IDS)),
    (ValueError, r"cos: shape is \(3, 5, 4\)", lambda: tkq.rope(X, *[torch.zeros(3, 5, 4)] * 2)),
    (ValueError, r"cos: shape is \(1, 6, 4\)", lambda: tkq.rope(X, *[torch.zeros(1, 6, 4)] * 2)),
    (ValueError, "cu_seqlens or position_ids is needed", lambda: tkq.rope(FLAT, COS, COS)),
    (ValueError, r"cu_seqlens: goes with x .*, and not with x \(B, S, H, D\)$",
     lambda: tkq.rope(X, COS, COS, cu_seqlens=STARTS)),
    (ValueError, r"cu_seqlens: goes with x .*, and not with x \(B, S, H, D\)$",
     lambda: tkq.rope(X, COS, COS, cu_seqlens=STARTS, seqlen_offsets=1)),
    (ValueError, "cu_seqlens: goes with x .*, and not with position_ids$",
     lambda: tkq.rope(FLAT, COS, COS, cu_seqlens=STARTS, position_ids=IDS.flatten())),
    (TypeError, "cu_seqlens: dtype is torch.int64", lambda: tkq.rope(FLAT, COS, COS, cu_seqlens=STARTS.long())),
    (ValueError, r"cu_seqlens: got shape \(1,\)", lambda: tkq.rope(FLAT, COS, COS, cu_seqlens=STARTS[:1])),
    (ValueError, r"cu_seqlens: got shape \(2,\), strides \(2,\)",
     lambda: tkq.rope(FLAT, COS, COS, cu_seqlens=STARTS[::2])),
    (ValueError, r"seqlen_offsets: shape is \(3,\), expected \(2\)",
     lambda: tkq.rope(FLAT, COS, COS, cu_seqlens=STARTS, seqlen_offsets=torch.zeros(3).int())),
    (ValueError, "max_seqlen 10 from offset 0 needs 10",
     lambda: tkq.rope(FLAT, COS, COS, cu_seqlens=STARTS, max_seqlen=10)),
    (ValueError, "max_seqlen: got -1, allowed are integers from 0 to",
     lambda: tkq.rope(FLAT, COS, COS, cu_seqlens=STARTS, max_seqlen=-1)),
    (TypeError, "interleaved: got a Tensor", lambda: tkq.rope(X, COS, COS, interleaved=torch.ones(2))),
    (ValueError, "cos: is on meta", lambda: tkq.rope(X, *[COS.to("meta")] * 2)),
    (NotImplementedError, "cos requires a gradient", lambda: tkq.rope(X, COS.clone().requires_grad_(), COS)),
    (TypeError, "k is torch.float16, q is torch.float32", lambda: tkq.rope_qk(X, X.half(), COS, COS)),
    (ValueError, "only heads may differ", lambda: tkq.rope_qk(X, X[:, :4], COS, COS)),
    (ValueError, "k: strides are", lambda: tkq.rope_qk(X, X.transpose(2, 3), COS, COS))])
def test_bad_input_is_named(error, says, call):
    with pytest.raises(error, match=says):
        call()


def test_opcheck():
    cos, sin = tkq.rope_cos_sin(16, 6, device="cpu")
    x = torch.randn(2, 5, 3, 8, requires_grad=True)
    torch.library.opcheck(torch.ops.tkq.rope, (x, cos, sin, 1, None, None, None, False, False))
    torch.library.opcheck(torch.ops.tkq.rope, (x, cos, sin, 0, None, IDS, None, True, True))
    torch.library.opcheck(torch.ops.tkq.rope_qk, (x, x[:, :, :1], cos, sin, 1, None, None, None, False, False))
    torch.library.opcheck(torch.ops.tkq.rope, (x.flatten(0, 1), cos, sin, 0, None, None, STARTS, False, False))


def test_starts_of_sequences_in_a_compiled_function():
    x, starts, tables = torch.randn(2, 5, 2, 32).bfloat16(), torch.tensor([1, 2]), tkq.rope_cos_sin(8, 32)
    for call in (lambda x, starts: tkq.rope(x, *tables, seqlen_offsets=starts),
                 lambda x, starts: tkq.rope_qk(x, x, *tables, seqlen_offsets=starts)[1]):
        compiled = torch.compile(call, backend="eager", fullgraph=True)
        assert torch.equal(compiled(x, starts), call(x, starts))


@pytest.mark.parametrize("batch", [1, 2])
def test_no_tokens_with_a_row_each(batch):
    x = torch.zeros(2, 0, 1, 8, requires_grad=True)
    y = tkq.rope(x, torch.zeros(batch, 0, 4), torch.zeros(batch, 0, 4))
    assert y.shape == x.shape == torch.autograd.grad(y.sum(), x)[0].shape
