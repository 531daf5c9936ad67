"""tkq.flex_attention as custom ops, for torch.compile and other tracers: functions are recorded as text, which an op
takes with tensors and numbers."""
from __future__ import annotations

from typing import NamedTuple, Optional

import torch
from torch import Tensor

from tkq.attention.flex.check import BlockTensors, blocks_from, settled
from tkq.attention.flex.devices import forward, gradients, result_like
from tkq.attention.flex.functions import replay
from tkq.attention.flex.functions.record import Recorded, record
from tkq.attention.flex.functions.trace import ARGUMENTS, OP
from tkq.attention.flex.launch import Call
from tkq.runtime.call import check, ops

NOTHING = Recorded("", [], [])


def attention(q, k, v, functions, tensors: BlockTensors, scale: float, want_lse: bool):
    """(o, lse). functions: score_mod and mask_mod, or None; tensors: of the block mask."""
    score, mask = (NOTHING if function is None else record(function, ARGUMENTS[name], q.device)
                   for name, function in zip(("score_mod", "mask_mod"), functions))
    check.refuse_tangent(OP, **{f"captured tensor {i}": x for i, x in enumerate([*score.tensors, *mask.tensors])})
    lists, full, size = tensors
    needs = ops.may_record(q, k, v, *score.tensors)
    return _op(q, k, v, score.tensors, mask.tensors, lists, score.numbers, mask.numbers, score.text, mask.text,
               full, size, scale, want_lse or needs)


class Given(NamedTuple):
    """The ops' arguments behind q, k and v. score_tensors, mask_tensors, score_numbers, mask_numbers, score, mask: of
    two ``Recorded``, whose text is "" where there is no function. lists, full, size: of ``BlockTensors``."""

    score_tensors: list
    mask_tensors: list
    lists: list
    score_numbers: list
    mask_numbers: list
    score: str
    mask: str
    full: bool
    size: list
    scale: float

    def call(self, q, k, v) -> Call:
        score, mask = (None if not text else replay.traced(name, Recorded(text, tensors, numbers))
                       for name, text, tensors, numbers in (
                           ("score_mod", self.score, self.score_tensors, self.score_numbers),
                           ("mask_mod", self.mask, self.mask_tensors, self.mask_numbers)))
        score, mask = settled("score_mod", score, q), settled("mask_mod", mask, q)
        return Call(q, k, v, score, mask, blocks_from(BlockTensors(self.lists, self.full, self.size), q, k), self.scale)


def _cuda(q: Tensor, k: Tensor, v: Tensor, score_tensors: list[Tensor], mask_tensors: list[Tensor], lists: list[Tensor],
          score_numbers: list[int], mask_numbers: list[int], score: str, mask: str, full: bool, size: list[int],
          scale: float, return_lse: bool) -> tuple[Tensor, Tensor]:
    given = Given(score_tensors, mask_tensors, lists, score_numbers, mask_numbers, score, mask, full, size, scale)
    o, lse = forward(given.call(q, k, v), return_lse)
    return o, lse if return_lse else q.new_empty(0, dtype=torch.float32)


def _fake(q, k, v, *given):
    lse = q.new_empty(q.shape[:3] if given[-1] else (0,), dtype=torch.float32)
    return result_like(q, v.shape[3]), lse


def _setup(ctx, inputs, output):
    q, k, v, *given = inputs
    o, lse = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, o, lse, *(x for tensors in given[:3] for x in tensors))
    ctx.known = tuple(len(tensors) for tensors in given[:3]), given[3:10]


def _back(ctx, do, dlse):
    """Of exactly the inputs that need one."""
    counts, known = ctx.known
    # empty lists count as lists of tensors
    nothing = *([None] * n for n in counts), *([] if isinstance(x, list) and not x else None for x in known), None
    if do is None and dlse is None:
        return *(None,) * 3, *nothing
    q, k, v, o, lse, *rest = ctx.saved_tensors
    tensors = [rest[sum(counts[:i]):sum(counts[:i + 1])] for i in range(3)]
    needed, learned = list(ctx.needs_input_grad[:3]), ctx.needs_input_grad[3]
    slots = [i for i in range(counts[0]) if learned[i]]
    do = torch.zeros_like(o) if do is None else do
    *found, flat = _backward_op(do, o, lse, dlse, q, k, v, *tensors, *known, needed, slots)
    sizes = [tensors[0][i].numel() for i in slots]
    for i, x in zip(slots, flat.split(sizes) if slots else ()):
        nothing[0][i] = x.view(tensors[0][i].shape).to(tensors[0][i].dtype)
    return *(x if need else None for x, need in zip(found, needed)), *nothing


def _backward_cuda(
        do: Tensor, o: Tensor, lse: Tensor, dlse: Optional[Tensor], q: Tensor, k: Tensor, v: Tensor,
        score_tensors: list[Tensor], mask_tensors: list[Tensor], lists: list[Tensor], score_numbers: list[int],
        mask_numbers: list[int], score: str, mask: str, full: bool, size: list[int], scale: float, needed: list[bool],
        slots: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, gradients of score_tensors in ``slots``: fp32, one behind the other)"""
    # one tensor in two places has a gradient for each
    score_tensors = [x.view_as(x) if any(x is y for y in score_tensors[:i]) else x for i, x in enumerate(score_tensors)]
    given = Given(score_tensors, mask_tensors, lists, score_numbers, mask_numbers, score, mask, full, size, scale)
    call, rows, slots = given.call(q, k, v), (do, o, lse, dlse), tuple(slots)
    where = {x: i for i, x in enumerate(call.score.tensors)} if slots else {}
    learned = [score_tensors[i] for i in slots]
    found, captured = gradients(call, rows, needed, tuple(where[x] for x in learned if x in where))
    captured = iter(captured)
    flat = [next(captured).float().reshape(-1) if x in where else lse.new_zeros(x.numel()) for x in learned]
    return (*(x if need else like.new_empty(0) for x, need, like in zip(found, needed, (q, k, v))),
            torch.cat(flat) if flat else lse.new_empty(0))


def _backward_fake(do, o, lse, dlse, q, k, v, score_tensors, *rest):
    *_, needed, slots = rest
    found = [result_like(x) if need else x.new_empty(0) for x, need in zip((q, k, v), needed)]
    return *found, lse.new_empty(sum(score_tensors[i].numel() for i in slots))


def _cpu(*args):
    return _cuda(*args)


def _backward_cpu(*args):
    return _backward_cuda(*args)


_op = ops.torch_op("flex_attention", cuda=_cuda, cpu=_cpu, fake=_fake, setup=_setup, backward=_back, of=OP)
_backward_op = ops.torch_op("flex_attention_backward", cuda=_backward_cuda, cpu=_backward_cpu, fake=_backward_fake,
                            of=OP)
