"""The host path of flex_attention, with kernels that are notes: what they are given, and memory for gradients."""
import functools

import pytest
import torch

import tkq
from tests.helpers.emulation import fake_gpu
from tests.helpers.emulation.contract import misfits
from tkq.attention.flex.lists import Blocks, backward_lists
from tkq.attention.flex.operands import BlockLists

BF16 = torch.bfloat16


def soft(score, b, h, q_idx, kv_idx):
    return 20 * torch.tanh(score / 20)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


@functools.cache
def mask(rows, keys, block):
    return tkq.create_block_mask(causal, None, None, rows, keys, "cpu", block)


def attending(rows=300, keys=300, dims=(64, 64), heads=(4, 4), turned=False, like=BF16, block=None, **options):
    """A call and its backward; turned: rows before heads in memory."""
    leaves = [torch.zeros(2, n, h, d, dtype=like).transpose(1, 2) if turned else torch.zeros(2, h, n, d, dtype=like)
              for n, h, d in ((rows, heads[0], dims[0]), (keys, heads[1], dims[0]), (keys, heads[1], dims[1]))]
    options = options | (dict(block_mask=mask(rows, keys, block)) if block else {})

    def run():
        q, k, v = (x.detach().requires_grad_() for x in leaves)
        o = tkq.flex_attention(q, k, v, enable_gqa=heads[0] != heads[1], **options)
        torch.autograd.grad(o, (q, k, v), torch.zeros_like(o))

    return run


KINDS = [dict(keys=3000), dict(keys=9000), dict(dims=(128, 128)), dict(dims=(256, 256)), dict(dims=(72, 72)),
         dict(dims=(64, 128)), dict(heads=(4, 2)), dict(turned=True), dict(like=torch.float16), dict(scale=0.3),
         dict(score_mod=soft), dict(block=128), dict(block=64), dict(block=(256, 128)), dict(block=(128, 256)),
         dict(block=(128, 64)), dict(block=128, score_mod=soft)]


@pytest.mark.parametrize("kind", [{}, *KINDS], ids=" ".join)
def test_kernels_are_given_what_they_take(kind):
    call = attending(**kind)
    with fake_gpu.launches() as seen:
        call()
    assert len(seen) >= 2 and misfits(seen) == []


def test_calls_that_differ_in_one_thing_are_launched_apart():
    assert fake_gpu.apart(attending(), *(attending(**kind) for kind in KINDS))
    lengths = [attending(keys=keys, dims=(128, 128)) for keys in (300, 3000, 9000)]
    assert fake_gpu.apart(*lengths) and len({fake_gpu.seen_by(call)[0][0] for call in lengths}) > 1


@pytest.mark.parametrize("turned", (False, True))
def test_results_lie_as_the_query_does(turned):
    q = torch.zeros(2, 300, 4, 64, dtype=BF16).transpose(1, 2) if turned else torch.zeros(2, 4, 300, 64, dtype=BF16)
    with fake_gpu.launches():
        assert tkq.flex_attention(q, q, q).stride() == q.stride()


@pytest.mark.parametrize("rows", (1, 130, 300, 513))
@pytest.mark.parametrize("block, score", ((None, None), (128, None), (256, None), (256, soft), (512, None)))
def test_there_is_memory_for_whole_blocks_of_queries(rows, block, score):
    call = attending(rows, block=block, score_mod=score)
    with fake_gpu.launches() as seen:
        call()
    recipe, args = seen[-1]
    spec, config = recipe.args
    listed = config.tile * spec.q_per
    assert args[2].numel() == 2 * 4 * config.workspace_floats(spec.attention, -(-rows // listed) * listed)


def test_lists_may_not_change_until_a_gradient_is_made():
    made = tkq.create_block_mask(causal, None, None, 256, 256, "cpu", 128)
    q, k, v = (torch.zeros(1, 2, 256, 64, dtype=BF16).requires_grad_() for _ in range(3))
    o = tkq.flex_attention(q, k, v, block_mask=made)
    made.kv_indices.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


@pytest.mark.parametrize("block, per", ((128, (1, 1)), (256, (2, 2)), ((128, 256), (1, 2)), ((256, 128), (2, 1))))
def test_tiles_of_a_listed_block(block, per):
    q = torch.zeros(1, 2, 512, 128, dtype=BF16)
    call = functools.partial(tkq.flex_attention, q, q, q, block_mask=mask(512, 512, block))
    (recipe, _), = fake_gpu.seen_by(call)
    spec = recipe.args[0]
    assert (spec.q_per, spec.kv_per) == per


def test_listed_blocks_outside_are_taken_as_the_nearest_inside():
    indices = torch.tensor([7, -3]).int().view(1, 1, 2, 1)
    found, _ = backward_lists(Blocks(BlockLists(torch.ones(1, 1, 2).int(), indices), (128, 128)), 256)
    assert found.queries.num.tolist() == [[[1, 1]]] and found.queries.indices[..., 0].tolist() == [[[1, 0]]]
