"""A call of flex_attention: traced functions and lists to a launch, recorded by autograd or not."""
from typing import Any, NamedTuple

import torch
from torch.nn.attention.flex_attention import noop_mask

from tkq.attention.flex import traced_ops
from tkq.attention.flex.backward.capture_launch import refuse_if_deterministic
from tkq.attention.flex.check import OP, blocks_of, in_memory, settled, tensors_of
from tkq.attention.flex.devices import forward, gradients
from tkq.attention.flex.functions.captures import depends
from tkq.attention.flex.functions.derive import capture_slopes_of, slope_of
from tkq.attention.flex.functions.trace import check_function, trace
from tkq.attention.flex.launch import Call, calls
from tkq.runtime.call import ops

NOTHING = None, None, None  # of ``given_of``, where a call is not looked up


class Asked(NamedTuple):
    """score_mod: or None. mask_mod: without lists; a block_mask, which may be None too, has its own. scale: of the
    scores. op: the public function, whose errors they are. given: of ``given_of``."""

    score_mod: Any
    mask_mod: Any
    block_mask: Any
    scale: float
    op: str
    given: tuple = NOTHING


_NO_FUNCTION = (None,)
_LSE = 3  # its place in what follows


def given_of(tensors: tuple, options: tuple, score_mod, mask_mod, block_mask) -> tuple:
    """(what a call is looked up by: all that its launch follows from, as it came, or None where that cannot be said;
    what the score function depends on; what the mask function does, see ``depends``). options: want_lse, then what the
    function has besides."""
    lists = ()
    if block_mask is not None:
        try:
            mask_mod, lists = block_mask.mask_mod, (
                block_mask.kv_num_blocks, block_mask.kv_indices, block_mask.full_kv_num_blocks,
                block_mask.full_kv_indices, block_mask.q_num_blocks, block_mask.q_indices,
                block_mask.full_q_num_blocks, block_mask.full_q_indices, block_mask.BLOCK_SIZE, block_mask.seq_lengths)
        except AttributeError:
            return NOTHING
    score = _NO_FUNCTION if score_mod is None else depends(score_mod)
    mask = _NO_FUNCTION if mask_mod is None or mask_mod is noop_mask else depends(mask_mod)
    if score is None or mask is None:
        return NOTHING
    return (*tensors, *options, *lists, *score, *mask), score, mask


def attend(tensors: tuple, asked: Asked, want_lse: bool) -> tuple:
    """(o, lse or None). tensors: query, key and value, heads before rows, that have been looked at."""
    return (_traced if ops.route(*tensors) == "op" else _eager)(tensors, asked, want_lse)


def _traced(tensors, asked, want_lse):
    score_mod, mask_mod, block_mask, scale, op, _ = asked
    of_mask = tensors_of(block_mask, *tensors[:2], op)
    score_mod = None if score_mod is None else check_function("score_mod", score_mod, op)
    mask_mod = mask_mod if block_mask is None else block_mask.mask_mod
    mask_mod = None if mask_mod is None or mask_mod is noop_mask else check_function("mask_mod", mask_mod, op)
    return traced_ops.attention(*tensors, (score_mod, mask_mod), of_mask, scale, want_lse)


def _eager(tensors, asked, want_lse):
    score_mod, mask_mod, block_mask, scale, op, (given, *depend) = asked
    of_mask, blocks = blocks_of(block_mask, *tensors[:2], op)
    mask_mod = mask_mod if block_mask is None else of_mask
    score = None if score_mod is None else trace("score_mod", score_mod, op, depend[0])
    mask = None if mask_mod in (None, noop_mask) else trace("mask_mod", mask_mod, op, depend[1])
    score, mask = settled("score_mod", score, tensors[0], op), settled("mask_mod", mask, tensors[0], op)
    call = Call(*tensors, score, mask, blocks, scale)
    learned = learned_of(call)
    mode = ops.route(*call[:3], *learned)
    if mode == "op":
        raise NotImplementedError(f"{op}: score_mod: captured subclasses of tensors are not supported")
    if mode == "direct":
        return forward(call, want_lse, given)
    if call.score is not None:
        _refuse_slopes(call.score, learned)
    if given is not None and not given[_LSE]:
        given = (*given[:_LSE], True, *given[_LSE + 1:])
    return _Recorded.apply(*call[:3], (call, given), *learned)


def learned_of(call) -> tuple:
    """Captured tensors of the score function of which a gradient is asked. Those of a mask have none."""
    return tuple([x for x in call.score.tensors if x.requires_grad]) if call.score is not None else ()


def _refuse_slopes(score, learned):
    """What has no derivative, before anything is computed."""
    slope_of(score)
    if learned:
        if score.tensors[0].is_cuda:
            refuse_if_deterministic()
        capture_slopes_of(score, tuple(range(len(score.tensors))))


def _record(ctx, q, k, v, asked, *learned):
    """What a gradient needs is saved, captured tensors and lists among it: none of them may change until then. learned:
    those of the captured tensors that may require a gradient."""
    call, given = asked
    o, lse = (given and calls.take(*given)) or forward(call, True, given)
    functions = [x.tensors for x in (call.score, call.mask) if x is not None]
    lists = () if call.blocks is None else [x for x in call.blocks.lists if x is not None]
    ctx.save_for_backward(q, k, v, o, lse, *(x for tensors in (*functions, lists) for x in tensors))
    ctx.call = call._replace(q=None, k=None, v=None)
    ctx.slots = tuple(i for i, x in enumerate(call.score.tensors) if x.requires_grad) if learned else ()
    ctx.set_materialize_grads(False)
    return o, lse


def _back(ctx, do, dlse=None):
    if do is None and dlse is None:
        return (None,) * (4 + len(ctx.slots))
    q, k, v, o, lse = ctx.saved_tensors[:5]
    rows = torch.zeros_like(o) if do is None else in_memory(do), o, lse, in_memory(dlse)
    call, needed = ctx.call._replace(q=q, k=k, v=v), ctx.needs_input_grad
    found, learned = gradients(call, rows, needed[:3], tuple(
        slot for slot, need in zip(ctx.slots, needed[4:]) if need))
    learned = iter(learned)
    return (*(x if need else None for x, need in zip(found, needed)), None,
            *(next(learned) if need else None for need in needed[4:]))


_Recorded = ops.eager_function("FlexAttention", forward=_record, backward=_back, of=OP)
