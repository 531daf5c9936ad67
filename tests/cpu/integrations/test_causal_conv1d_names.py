"""causal-conv1d's names: against torch's convolution, seq_idx as sequences of their own, states in place."""
import itertools

import pytest
import torch
import torch.nn.functional as F

import tkq
from tkq.integrations.causal_conv1d import causal_conv1d_fn, causal_conv1d_update, causal_conv1d_varlen_states


def randn(*shape):
    return torch.randn(shape)


@pytest.mark.parametrize("channels_last", [False, True])
def test_the_function(channels_last):
    torch.manual_seed(0)
    x, weight, bias = randn(2, 5, 9), randn(5, 4), randn(5)
    x = x.mT.contiguous().mT if channels_last else x
    want = F.silu(F.conv1d(F.pad(x, (3, 0)), weight[:, None], bias, groups=5))
    for activation in ("silu", "swish"):
        y = causal_conv1d_fn(x, weight, bias, activation=activation)
        torch.testing.assert_close(y, want)
        assert y.stride() == x.stride()
    states, out = randn(2, 5, 3), torch.empty(2, 5, 3)
    y, final = causal_conv1d_fn(x, weight, bias, None, states, True, out)
    torch.testing.assert_close(y, F.conv1d(torch.cat((states, x), 2), weight[:, None], bias, groups=5))
    assert final is out and torch.equal(final, x[..., 6:])


def test_sequences_by_numbers():
    torch.manual_seed(0)
    x, weight = randn(2, 5, 9), randn(5, 4)
    seq_idx = torch.tensor([[0, 0, 1, 1, 1, 1, 2, 3, 3], [0] * 5 + [7] * 4], dtype=torch.int32)
    y = causal_conv1d_fn(x, weight, seq_idx=seq_idx)
    for b, (begin, end) in ((0, (0, 2)), (0, (2, 6)), (0, (6, 7)), (0, (7, 9)), (1, (0, 5)), (1, (5, 9))):
        torch.testing.assert_close(y[b:b + 1, :, begin:end], causal_conv1d_fn(x[b:b + 1, :, begin:end], weight))


def test_the_update():
    torch.manual_seed(0)
    x, weight, bias, pool = randn(2, 5), randn(5, 4), randn(5), randn(3, 5, 4)
    rows, padded = torch.tensor([2, 0]), torch.cat((pool[[2, 0], :, 1:], x[..., None]), 2)
    want = F.silu((padded * weight).sum(2) + bias)
    torch.testing.assert_close(causal_conv1d_update(x, pool, weight, bias, "silu", None, rows), want)
    assert torch.equal(pool[[2, 0], :, 3], x)
    assert causal_conv1d_update(randn(3, 5, 2), pool, weight).shape == (3, 5, 2)


@pytest.mark.parametrize("dtype, index", [(torch.float32, torch.int32), (torch.bfloat16, torch.int64)])
@pytest.mark.parametrize("state_len", [1, 3, 9])
def test_states_of_packed_sequences(state_len, dtype, index):
    """Long, short and empty ones; what is behind the tokens in memory is NaN."""
    torch.manual_seed(0)
    cuts = [0, 5, 5, 7, 19, 20]
    wide = torch.full((30, 7), float("nan"), dtype=dtype)
    wide[:20, :5] = randn(20, 5)
    x = wide[:20, :5]
    found = causal_conv1d_varlen_states(x, torch.tensor(cuts, dtype=index), state_len)
    assert found.shape == (5, 5, state_len) and found.dtype == dtype and found.is_contiguous()
    for n, (begin, end) in enumerate(itertools.pairwise(cuts)):
        want = F.pad(x[begin:end], (0, 0, state_len, 0))[-state_len:].mT
        assert torch.equal(found[n], want)


def test_states_of_packed_sequences_are_those_that_steps_go_on_from():
    torch.manual_seed(0)
    x, weight, cu = randn(9, 5), randn(5, 4), torch.tensor([0, 2, 9], dtype=torch.int32)
    _, want = tkq.causal_conv1d(x[None], weight, output_final_state=True, cu_seqlens=cu)
    assert torch.equal(causal_conv1d_varlen_states(x, cu, 3), want)


def test_states_of_packed_sequences_whatever_the_numbers_say():
    x = torch.arange(1.0, 5.0)[:, None]
    found = causal_conv1d_varlen_states(x, torch.tensor([-3, 2, 1, 99]), 2)
    assert found[:, 0].tolist() == [[1, 2], [0, 0], [3, 4]]
    assert causal_conv1d_varlen_states(x[:0], torch.tensor([0, 0]), 2).tolist() == [[[0, 0]]]
    assert causal_conv1d_varlen_states(x, torch.tensor([0]), 2).shape == (0, 1, 2)


@pytest.mark.parametrize("error, words, changed", [
    (ValueError, "x: has 3 dimensions", dict(x=torch.zeros(1, 4, 5))),
    (TypeError, "x: dtype is torch.int64", dict(x=torch.zeros(4, 5).long())),
    (TypeError, "cu_seqlens: got list", dict(cu_seqlens=[0, 4])),
    (TypeError, "cu_seqlens: dtype is torch.float32", dict(cu_seqlens=torch.zeros(2))),
    (ValueError, "cu_seqlens: has no numbers", dict(cu_seqlens=torch.zeros(0).int())),
    (ValueError, "cu_seqlens: has 2 dimensions", dict(cu_seqlens=torch.zeros(1, 2).int())),
    (ValueError, "cu_seqlens: is on meta", dict(cu_seqlens=torch.zeros(2, device="meta").int())),
    (ValueError, "state_len is 0", dict(state_len=0)), (TypeError, "state_len: got 2.0", dict(state_len=2.0))])
def test_states_of_packed_sequences_that_are_refused(error, words, changed):
    with pytest.raises(error, match=words):
        causal_conv1d_varlen_states(**dict(x=torch.zeros(4, 5), cu_seqlens=torch.tensor([0, 4]), state_len=3) | changed)


@pytest.mark.parametrize("error, words, call", [
    (NotImplementedError, "causal_conv1d_update: cache_seqlens", lambda x: causal_conv1d_update(
        x[0], x, x[0], cache_seqlens=x)),
    (ValueError, "causal_conv1d_fn: activation: got 'gelu'", lambda x: causal_conv1d_fn(x, x[0], activation="gelu")),
    (ValueError, "causal_conv1d_fn: seq_idx is given", lambda x: causal_conv1d_fn(
        x, x[0], seq_idx=torch.zeros(1, 4, dtype=torch.int32), return_final_states=True)),
    (TypeError, "causal_conv1d_fn: return_final_states: got 1", lambda x: causal_conv1d_fn(
        x, x[0], return_final_states=1)),
    (ValueError, "causal_conv1d_fn: bias: shape", lambda x: causal_conv1d_fn(
        x, x[0], torch.zeros(9), torch.zeros(1, 4, dtype=torch.int32))),
    (TypeError, "causal_conv1d_fn: initial_states: got str", lambda x: causal_conv1d_fn(x, x[0], initial_states="x")),
    (ValueError, "causal_conv1d_fn: initial_states: shape", lambda x: causal_conv1d_fn(x, x[0], initial_states=x)),
    (TypeError, "causal_conv1d_update: conv_state_indices: got list", lambda x: causal_conv1d_update(
        x[..., 0], x, x[0], conv_state_indices=[0])),
    (ValueError, "causal_conv1d_update: conv_state_indices: shape", lambda x: causal_conv1d_update(
        x[..., 0], x, x[0], conv_state_indices=torch.zeros(2, dtype=torch.int32))),
    (ValueError, "causal_conv1d_update: conv_state: shape", lambda x: causal_conv1d_update(x[..., 0], x.mT, x[0])),
    (ValueError, "causal_conv1d_update: conv_state: has 0 rows for 1", lambda x: causal_conv1d_update(
        x[..., 0], x[:0], x[0])),
    (ValueError, "causal_conv1d_update: conv_state: is .* may share memory", lambda x: causal_conv1d_update(
        x[..., 0], x[..., :1].expand_as(x), x[0])),
    (ValueError, "causal_conv1d_fn: weight: has 0 dimensions", lambda x: causal_conv1d_fn(
        x, torch.tensor(1.0), return_final_states=True, final_states_out=x)),
    (TypeError, "causal_conv1d_fn: return_final_states: got 'no'", lambda x: causal_conv1d_fn(
        x, x[0], return_final_states="no")),
    (TypeError, "causal_conv1d_fn: x: got int", lambda x: causal_conv1d_fn(3, x[0]))])
def test_what_is_refused(error, words, call):
    with pytest.raises(error, match=words):
        call(torch.zeros(1, 5, 4))


def test_the_module():
    torch.manual_seed(0)
    layer = tkq.nn.ShortConvolution(5, 4, bias=True)
    x, pool = randn(2, 9, 5), torch.zeros(2, 5, 3)
    y, state = layer(x, None, True)
    torch.testing.assert_close(y, tkq.causal_conv1d(x, layer.weight[:, 0], layer.bias, "silu"))
    with torch.no_grad():
        found = torch.stack([layer.step(x[:, t], pool) for t in range(9)], 1)
    torch.testing.assert_close(found, y)
    assert torch.equal(pool, state)
    with pytest.raises(ValueError, match="ShortConvolution: activation: got 'gelu'"):
        tkq.nn.ShortConvolution(5, 4, activation="gelu")


@pytest.mark.parametrize("shape", [(2, 16, 3), (1, 16, 1), (2, 1, 3)])
def test_final_states_are_memory_of_their_own(shape):
    """Where the last tokens of x lie as its final states do."""
    x, weight = torch.randn(shape), torch.randn(shape[1], shape[2] + 1) if shape[2] > 1 else torch.randn(shape[1], 2)
    _, states = causal_conv1d_fn(x, weight, return_final_states=True)
    assert states.is_contiguous() and states.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


@pytest.mark.parametrize("out, more, message", [
    ((2, 16, 3), dict(), "final_states_out is given, allowed is with return_final_states"),
    ((5, 16, 3), dict(return_final_states=True), r"final_states_out: shape is \(5, 16, 3\), expected \(2, 16, 3\)")])
def test_where_final_states_go_is_checked(out, more, message):
    with pytest.raises(ValueError, match=message):
        causal_conv1d_fn(torch.randn(2, 16, 9), torch.randn(16, 4), final_states_out=torch.empty(out), **more)


SHARED = torch.randn(2, 16, 9)


@pytest.mark.parametrize("out, error, words", [
    (lambda: torch.empty(2, 16, 3, dtype=torch.int32), TypeError, "final_states_out: dtype is torch.int32"),
    (lambda: torch.empty(2, 16, 3, device="meta"), ValueError, "final_states_out: is on meta, but x is on cpu"),
    (lambda: torch.empty(1, 16, 3).expand(2, 16, 3), ValueError, "final_states_out: is .* may share memory"),
    (lambda: SHARED[..., :3], ValueError, "final_states_out shares memory with x"),
    (lambda: torch.empty(2, 16, 3, requires_grad=True), RuntimeError, "final_states_out is a leaf"),
    (lambda: 3, TypeError, "final_states_out: got int")])
def test_where_final_states_go_is_written_alone(out, error, words):
    before = SHARED.clone()
    with pytest.raises(error, match=f"(causal_conv1d_fn: )?{words}"):
        causal_conv1d_fn(SHARED, torch.randn(16, 4), return_final_states=True, final_states_out=out())
    assert torch.equal(SHARED, before)


@pytest.mark.parametrize("name", ("weight", "bias"))
def test_final_states_are_not_written_into_parameters(name):
    given = dict(weight=torch.randn(4, 4), bias=torch.randn(4))
    out = given[name].view(-1)[:4].view(1, 4, 1).expand(1, 4, 1)
    given["weight"] = given["weight"][:, :2]
    with pytest.raises(ValueError, match=f"causal_conv1d_fn: final_states_out shares memory with {name}"):
        causal_conv1d_fn(torch.randn(1, 4, 9), **given, return_final_states=True, final_states_out=out)


def test_final_states_are_written_where_states_were():
    x, weight, states = SHARED, torch.randn(16, 4), torch.randn(2, 16, 3)
    want = causal_conv1d_fn(x, weight, None, None, states, True)
    found = causal_conv1d_fn(x, weight, None, None, states, True, states)
    assert found[1] is states and all(map(torch.equal, found, want))


def test_final_states_are_written_in_compiled_code():
    given, out = (SHARED, torch.randn(16, 4)), torch.empty(2, 16, 3)
    torch._dynamo.reset()
    compiled = torch.compile(causal_conv1d_fn, fullgraph=True, backend="eager")
    compiled(*given, return_final_states=True, final_states_out=out)
    assert torch.equal(out, SHARED[..., 6:])


def test_the_op_itself_checks_its_activation():
    with pytest.raises(ValueError, match="activation"):
        torch.ops.tkq.causal_conv1d(torch.randn(1, 8, 4), torch.randn(4, 3), None, "relu", None, False, None,
                                    0, 128)
