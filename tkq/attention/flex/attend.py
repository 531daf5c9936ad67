"""A call of flex_attention: traced functions and lists to a launch, recorded by autograd or not."""
from typing import Any, NamedTuple

import torch
from torch.nn.attention.flex_attention import noop_mask

from tkq.attention.flex import traced_ops
from tkq.attention.flex.again import Again
from tkq.attention.flex.backward.capture_launch import refuse_if_deterministic
from tkq.attention.flex.check import OP, blocks_of, in_memory, settled, tensors_of
from tkq.attention.flex.devices import forward, gradients
from tkq.attention.flex.functions.captures import depends
from tkq.attention.flex.functions.derive import capture_slopes_of, slope_of
from tkq.attention.flex.functions.trace import check_function, trace
from tkq.attention.flex.launch import Call, calls
from tkq.attention.flex.lists import widened
from tkq.runtime.call import ops

NOTHING = None, None, None  # of ``given_of``, where a call is not looked up


class Asked(NamedTuple):
    """score_mod: or None. mask_mod: without lists; a block_mask, which may be None too, has its own. scale: of the
    scores. op: the public function, whose errors they are. given: of ``given_of``. rows_first: query, key, value and o
    have rows before heads."""

    score_mod: Any
    mask_mod: Any
    block_mask: Any
    scale: float
    op: str
    given: tuple = NOTHING
    rows_first: bool = False


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
    """(o, lse or None). tensors: query, key and value that have been looked at."""
    return (_traced if ops.route(*tensors) == "op" else _eager)(tensors, asked, want_lse)


def records(tensors: tuple) -> bool:
    """Does autograd record a call in plain eager mode? Of what could not be said at once: no."""
    return torch.is_grad_enabled() and ops.short.route(*tensors) == "record"


def recorded_again(tensors: tuple, given: tuple, rows_first: bool = False) -> tuple | None:
    """(o, lse) of a call that autograd records, where one like it was recorded before; else None. given: the first of
    ``given_of``, with lse."""
    found = calls.known(*given)
    if found is None:
        return None
    learned = () if found.score is None else _learned(found.score.captured(given[3:]))
    if learned:
        _refuse_slopes(found.score.of(given[3:]), learned)
    return _Recorded.apply(*tensors, (found, given, rows_first), *learned)


def _heads_first(tensors, rows_first):
    """Also of one tensor or None among them; or the other way round."""
    return tuple([x if x is None else x.transpose(1, 2) for x in tensors]) if rows_first else tensors


def _traced(tensors, asked, want_lse):
    score_mod, mask_mod, block_mask, scale, op, _, rows_first = asked
    tensors = _heads_first(tensors, rows_first)
    of_mask = tensors_of(block_mask, *tensors[:2], op)
    score_mod = None if score_mod is None else check_function("score_mod", score_mod, op)
    mask_mod = mask_mod if block_mask is None else block_mask.mask_mod
    mask_mod = None if mask_mod is None or mask_mod is noop_mask else check_function("mask_mod", mask_mod, op)
    o, lse = traced_ops.attention(*tensors, (score_mod, mask_mod), of_mask, scale, want_lse)
    return o.transpose(1, 2).contiguous() if rows_first else o, lse


def _eager(tensors, asked, want_lse):
    score_mod, mask_mod, block_mask, scale, op, (given, *depend), rows_first = asked
    heads = _heads_first(tensors, rows_first)
    of_mask, blocks = blocks_of(block_mask, *heads[:2], op)
    mask_mod = mask_mod if block_mask is None else of_mask
    score = None if score_mod is None else trace("score_mod", score_mod, op, depend[0])
    mask = None if mask_mod in (None, noop_mask) else trace("mask_mod", mask_mod, op, depend[1])
    score, mask = settled("score_mod", score, tensors[0], op), settled("mask_mod", mask, tensors[0], op)
    call = Call(*heads, score, mask, blocks, scale)
    learned = () if score is None else _learned(score.tensors)
    mode = ops.route(*tensors, *learned)
    if mode == "op":
        raise NotImplementedError(f"{op}: score_mod: captured subclasses of tensors are not supported")
    if mode == "direct":
        return forward(call, want_lse, given, rows_first)
    if call.score is not None:
        _refuse_slopes(call.score, learned)
    if given is not None and not given[_LSE]:
        given = (*given[:_LSE], True, *given[_LSE + 1:])
    return _Recorded.apply(*tensors, (call, given, rows_first), *learned)


def _learned(tensors) -> tuple:
    """Captured tensors of a score function of which a gradient is asked. Those of a mask have none."""
    return tuple([x for x in tensors if x.requires_grad])


def _refuse_slopes(score, learned):
    """What has no derivative, before anything is computed."""
    slope_of(score)
    if learned:
        if score.tensors[0].is_cuda:
            refuse_if_deterministic()
        capture_slopes_of(score, tuple(range(len(score.tensors))))


def _record(ctx, q, k, v, asked, *learned):
    """What a gradient needs is saved, captured tensors and lists among it: none of them may change until then. asked:
    (``Call``, or ``Again`` of one that is known, what it is looked up by or None, do rows come first?). learned: those
    of the captured tensors that may require a gradient."""
    of, given, rows_first = asked
    known, rest = type(of) is Again, given and given[3:]
    if known:
        call_of, kept = lambda tensors: of.call_of(tensors, rest), [rest[i] for i in of.kept]
    else:
        call_of, kept = Call(None, None, None, *of[3:]).with_tensors, of.kept()
    found = given and calls.take(*given)
    if not found:
        call = call_of(_heads_first((q, k, v), rows_first))
        found = forward(call._replace(blocks=widened(call.blocks, call.q)), True, given, rows_first)
    if given is not None and not known:
        calls.note(Again.of(of, rest), *given)
    o, lse = found
    ctx.save_for_backward(q, k, v, o, lse, *kept)
    ctx.call_of, ctx.rows_first, ctx.slots = call_of, rows_first, ()
    if learned:
        captured = of.score.captured(rest) if known else of.score.tensors
        ctx.slots = tuple(i for i, x in enumerate(captured) if x.requires_grad)
    ctx.set_materialize_grads(False)
    return o, lse


def _back(ctx, do, dlse=None):
    if do is None and dlse is None:
        return (None,) * (4 + len(ctx.slots))
    q, k, v, o, lse = ctx.saved_tensors[:5]
    do = torch.zeros_like(o) if do is None else in_memory(do)
    do, q, k, v, o = _heads_first((do, q, k, v, o), ctx.rows_first)
    call, needed = ctx.call_of((q, k, v)), ctx.needs_input_grad
    found, learned = gradients(call, (do, o, lse, in_memory(dlse)), needed[:3], tuple(
        slot for slot, need in zip(ctx.slots, needed[4:]) if need))
    found, learned = _heads_first(found, ctx.rows_first), iter(learned)
    return (*(x if need else None for x, need in zip(found, needed)), None,
            *(next(learned) if need else None for need in needed[4:]))


_Recorded = ops.eager_function("FlexAttention", forward=_record, backward=_back, of=OP)
