"""The host path of attention's gradients, with kernels that are notes: options, memory that is handed over, what is
filled with zeros."""
import pytest
import torch

import tkq
from tests.helpers.emulation import fake_gpu
from tkq.attention import ops, varlen_ops
from tkq.attention.arguments import Lengths, Options
from tkq.attention.backward import ops as backward_ops
from tkq.attention.backward import varlen_ops as backward_varlen_ops
from tkq.attention.backward.plan import length_class, plan
from tkq.attention.common.operands import Sequences
from tkq.attention.common.sequences import VarlenBatch

BF16, INT = torch.bfloat16, torch.int32


def zeros(*shape):
    return torch.zeros(shape, dtype=BF16)


def saved(q, k, dlse=None):
    """As `attention_backward` takes them."""
    return q, q, k, k, q, torch.zeros(*q.shape[:-3], q.shape[-2], q.shape[-3]), dlse


@pytest.mark.parametrize("way", ("eager", "op"))
@pytest.mark.parametrize("ragged", (False, True))
@pytest.mark.parametrize("deterministic", (False, True))
def test_the_backward_knows_what_was_asked_of_the_forward(way, ragged, deterministic):
    """Also of a call without return_lse."""
    q, cu = zeros(*[1] * (not ragged), 64, 2, 64).requires_grad_(), torch.tensor([0, 64], dtype=INT)
    module, lengths = (varlen_ops, (cu, cu, None, None, 64, 64)) if ragged else (ops, ())
    with fake_gpu.launches() as seen:
        if way == "op":
            o, _ = module._traced(q, q, q, None, *[lengths] * ragged, (True, 0.5, 7, -1, 3.0), False, deterministic)
        else:
            call, given = (tkq.flash_attn_varlen, (cu, cu, 64, 64)) if ragged else (tkq.flash_attn, ())
            o = call(q, q, q, *given, causal=True, softmax_scale=0.5, window_size=(7, None), softcap=3.0,
                     deterministic=deterministic)
        o.sum().backward()
    recipe, args = seen[-1]
    spec = recipe.args[0]
    assert (spec.deterministic, spec.left, spec.right, spec.softcap) == (deterministic, True, True, True)
    assert args[-1][:4] == (0.5, 3.0, 7, 0) and args[0][5].shape == saved(q, q)[5].shape
    assert not ragged or (args[3][0] is cu and args[3][1] is cu)


@pytest.mark.parametrize("batch, heads, kv_heads, rows, keys", ((1, 4, 4, 130, 70), (3, 8, 2, 300, 4100),
                                                                (2, 4, 1, 1, 9000)))
@pytest.mark.parametrize("causal", (False, True))
def test_there_is_memory_for_all_heads(batch, heads, kv_heads, rows, keys, causal):
    q, k = zeros(batch, rows, heads, 128), zeros(batch, 1, kv_heads, 128).expand(batch, keys, kv_heads, 128)
    with fake_gpu.launches() as seen:
        of_rows = backward_ops.run(saved(q, k), (q, k, k), Options(causal))
    (recipe, (_, _, workspace, *_)), = seen
    spec, config = recipe.args
    assert config == plan(spec, length_class(keys), heads // kv_heads)
    assert workspace.numel() == batch * (heads * config.workspace_floats(spec, rows)
                                         + kv_heads * config.dkv_partial_floats(spec, keys))
    tiles = -(-rows // config.tile)
    workspace[:] = torch.arange(len(workspace))
    row = torch.arange(rows)
    first = torch.arange(batch * heads)[:, None] * tiles * 2 * config.tile
    own = first + row // config.tile * 2 * config.tile + config.tile + row % config.tile
    assert torch.equal(of_rows(), own.view(batch, heads, rows).float())


@pytest.mark.parametrize("sequences, rows", ((1, 1), (1, 129), (5, 640), (70, 3)))
def test_there_is_memory_for_all_sequences_slots(sequences, rows):
    q, cu = zeros(rows, 4, 64), torch.zeros(sequences + 1, dtype=INT)
    with fake_gpu.launches() as seen:
        statistics = backward_varlen_ops.run(saved(q, q), (q, q, q), Lengths(cu, cu, None, None, rows, rows))
    (recipe, (_, _, workspace, *_)), = seen
    spec, config = recipe.args
    slots = VarlenBatch(Sequences(cu, cu), rows, rows).slots(False, config.tile)
    assert workspace.numel() == 4 * config.workspace_floats(spec, slots * config.tile)
    assert all(x.shape == (4, slots, config.tile) for x in statistics())


@pytest.mark.parametrize("name", ("seqused_q", "seqused_k"))
def test_gradients_of_rows_that_are_not_in_use_are_zeros(name, monkeypatch):
    """No task has them; the others' memory is not filled, which would cost its time."""
    q, cu, filled = zeros(64, 2, 64), torch.tensor([0, 64], dtype=INT), []
    real = torch.zeros
    lengths = Lengths(cu, cu, None, None, 64, 64)._replace(**{name: torch.tensor([5], dtype=INT)})
    with fake_gpu.launches() as seen:
        monkeypatch.setattr(torch, "zeros", lambda *a, **more: filled.append(made := real(*a, **more)) or made)
        backward_varlen_ops._cuda(saved(q, q), None, lengths, Options(), False, (True, True, True, False))
    gradients = seen[0][1][1]
    assert [any(x is y for y in filled) for x in gradients] == (
        [True, False, False] if name == "seqused_q" else [False, True, True])


@pytest.mark.parametrize("name", ("seqused_q", "seqused_k"))
def test_lengths_in_use_are_of_all_sequences(name):
    """A kernel would read behind a shorter one."""
    q, cu = zeros(64, 2, 64), torch.tensor([0, 9, 64], dtype=INT)
    lengths = Lengths(cu, cu, None, None, 64, 64)._replace(**{name: torch.tensor([5], dtype=INT)})
    with fake_gpu.launches() as seen:
        with pytest.raises(ValueError, match=rf"{name}: shape is \(1,\), expected \(2\)"):
            backward_varlen_ops._cuda(saved(q, q), None, lengths, Options(), False, (True,) * 3 + (False,))
        with pytest.raises(ValueError, match=rf"{name}: shape is \(1,\), expected \(2\)"):
            varlen_ops.forward(q, q, q, None, tuple(lengths), tuple(Options()), False)
    assert not seen


@pytest.mark.parametrize("dim", (64, 320))
@pytest.mark.parametrize("ragged", (False, True))
def test_limits_that_no_row_reaches_are_none(dim, ragged):
    """Of packed sequences by the tensors' sizes: what the caller says is longest may be wrong."""
    q, k, cu = zeros(*[1] * (not ragged), 40, 2, dim), zeros(*[1] * (not ragged), 90, 2, dim), torch.zeros(2).int()
    for left, right, found in ((88, 38, (88, 38)), (89, 39, (-1, -1)), (-1, -1, (-1, -1)), (0, 0, (0, 0))):
        options = Options(False, None, left, right)
        with fake_gpu.launches() as seen:
            if ragged:
                backward_varlen_ops.run(saved(q, k), (q, k, k), Lengths(cu, cu, None, None, 1, 1), options)
            else:
                backward_ops.run(saved(q, k), (q, k, k), options)
        spec = seen[0][0].args[0]
        assert (*seen[0][1][-1][2:4], spec.left, spec.right) == (*found, found[0] >= 0, found[1] >= 0)


@pytest.mark.parametrize("dim", (64, 320))
@pytest.mark.parametrize("ragged", (False, True))
def test_which_gradients_a_kernel_knows(dim, ragged):
    """Of the log-sum-exp, whether the queries' is wanted, and whether a softcap had a part in them."""
    q, cu = zeros(*[1] * (not ragged), 40, 2, dim), torch.zeros(2).int()
    for dq, dlse, softcap in ((q, None, 0.0), (None, torch.zeros(*q.shape[:-3], 2, 40), 3.0)):
        options = Options(softcap=softcap)
        with fake_gpu.launches() as seen:
            if ragged:
                backward_varlen_ops.run(saved(q, q, dlse), (dq, q, q), Lengths(cu, cu, None, None, 40, 40), options)
            else:
                backward_ops.run(saved(q, q, dlse), (dq, q, q), options)
        spec = seen[0][0].args[0]
        assert (spec.dq, spec.dlse, spec.softcap) == (dq is not None, dlse is not None, softcap > 0)


def test_sinks_of_calls_without_keys():
    """The log-sum-exp of a row is its sink then, and lse's gradient all goes to it."""
    q, k, sinks = zeros(1, 5, 2, 64), zeros(1, 0, 2, 64), torch.zeros(2)
    for ragged in (False, True):
        tensors = saved(q[0], k[0], torch.ones(2, 5)) if ragged else saved(q, k, torch.ones(1, 2, 5))
        cu = torch.tensor([0, 5], dtype=INT)
        with fake_gpu.launches() as seen:
            if ragged:
                found = backward_varlen_ops._cuda(tensors, sinks, Lengths(cu, cu * 0), Options(), False, (True,) * 4)
            else:
                found = backward_ops._cuda(tensors, sinks, Options(), False, (True,) * 4)
        assert not seen and found[3].tolist() == [5.0, 5.0]


@pytest.mark.parametrize("ragged", (False, True))
def test_numbers_are_looked_at_before_a_launch(ragged):
    q, cu = zeros(*[1] * (not ragged), 64, 2, 64), torch.tensor([0, 64], dtype=INT)
    module, lengths = (backward_varlen_ops, [Lengths(cu, cu, None, None, 64, 64)]) if ragged else (backward_ops, [])
    for options in (Options(softmax_scale=0.0), Options(softcap=-1.0)):
        with fake_gpu.launches() as seen, pytest.raises(ValueError, match="softmax_scale: got|softcap: got"):
            module._cuda(saved(q, q), None, *lengths, options, False, (True,) * 3 + (False,))
        assert not seen


def test_which_rows_are_of_a_sequence_and_in_use():
    """Also where cu_seqlens fall, or end before the rows do."""
    for cu, used, found in (([0, 3, 3, 6], None, [1, 1, 1, 1, 1, 1, 0, 0]), ([0, 3, 3, 6], [2, 5, 0], [1, 1] + [0] * 6),
                            ([2, 5], None, [0, 0, 1, 1, 1, 0, 0, 0]), ([0, 6, 2, 8], [4, 4, 1], [1] * 4 + [0, 0, 1, 0]),
                            ([0, 20], [8], [1] * 8)):
        lengths = Lengths(torch.tensor(cu).int(), torch.tensor(cu).int(),
                          None if used is None else torch.tensor(used).int())
        assert backward_varlen_ops._in_use(lengths, 8).int().tolist() == found
