"""tkq.flex_attention: what PyTorch sees."""
from collections.abc import Callable
from typing import Optional

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as _torchs

from tkq.attention.flex import traced_ops
from tkq.attention.flex.backward.capture_launch import refuse_if_deterministic
from tkq.attention.flex.check import OP, blocks_of, check_captured, check_operands, options, scale_of, tensors_of
from tkq.attention.flex.derive import capture_slopes_of, slope_of
from tkq.attention.flex.devices import forward, gradients
from tkq.attention.flex.launch import Call
from tkq.attention.flex.trace import check_function, trace
from tkq.runtime.call import autocast, check, ops


def flex_attention(query: Tensor, key: Tensor, value: Tensor, score_mod: Optional[Callable] = None, block_mask=None,
                   scale: Optional[float] = None, enable_gqa: bool = False, return_lse: bool = False,
                   kernel_options: Optional[dict] = None, *, return_aux=None):
    """Exact attention with a score function and a mask of the user's own: torch's
    ``torch.nn.attention.flex_attention.flex_attention``, called the same way, with the same functions and block masks.

        softmax(score_mod(scale * query @ key.T, b, h, q_idx, kv_idx) where mask_mod(b, h, q_idx, kv_idx)) @ value

    Args:
        query: (B, H, Sq, D), bfloat16 or float16, D a multiple of 8 up to 128, any strides: where TMA cannot take
            them it is copied.
        key, value: (B, Hk, Sk, D) and (B, Hk, Sk, Dv), as query; Dv need not be D.
        score_mod: takes a score, float32, and its batch, head, query and key, int32, all tensors of no dimension; gives
            the new score. It is traced: pointwise operations of ATen, and elements of captured tensors of any dtype but
            float64 and complex, by any integers (negative ones count from the end, others outside are taken as the
            nearest inside). Captured numbers are arguments of the kernel: another value compiles nothing. -inf hides
            a key.
        block_mask: a BlockMask of torch's, or ``tkq.create_block_mask``'s, whose blocks are multiples of 64 queries and
            keys. Blocks that it does not list are skipped, full ones are computed without its mask_mod. Its lists are
            read on the GPU at each call: rebuilt in place, they count under a CUDA graph too.
        scale: of the scores; 1 / sqrt(D) where not given.
        enable_gqa: H is a multiple of Hk: each key head serves H / Hk consecutive query heads.
        return_lse: also return the log-sum-exp of each row.
        kernel_options: of torch's own kernels; of no effect.
        return_aux: torch's AuxRequest, whose lse is supported.

    Returns:
        o (B, H, Sq, Dv), of query's dtype, dense, rows and heads in the order in which query has them in memory. With
        return_lse the pair (o, lse), lse (B, H, Sq) float32, natural logarithm; with return_aux (o, AuxOutput). A row
        that sees no key has o = 0 and lse = -inf.

    Raises:
        TypeError: query, key or value is no dense tensor of bf16 or fp16; scale is no number; enable_gqa or return_lse
            is no bool; dtypes that differ; a score_mod that is no function, or gives no number, a block_mask that is
            none, or whose mask_mod gives no bool, a return_aux that is no AuxRequest.
        ValueError: a number that is not finite in float32; shapes that do not go together, devices that differ.
        NotImplementedError: a head_dim that is not supported; an operation that no kernel has, by its name; blocks of
            other sizes; a derivative that there is not, by its operation; gradients of captured tensors where
            ``torch.use_deterministic_algorithms`` is on; max_scores of return_aux.
        RuntimeError: a GPU other than Hopper.

    Differentiable once, in query, key, value and score_mod's captured tensors (not mask_mod's), through o and lse.
    Gradients of query and of captured tensors are added up in whatever order, in fp32; an index that was taken as the
    nearest inside counts there. Captured tensors and the mask's lists must not change until then.

    The functions' captured values are looked at in each call, nothing that changes is served stale; a function that was
    seen before costs a few microseconds. torch.compile and torch.export trace through, functions too, whose captured
    tensors may be results of the compiled program. Under torch.autocast query, key and value are cast.

    Source: Dong et al., Flex Attention: a programming model for generating optimized attention kernels, 2024. CPU
    tensors take ``tkq.reference.flex``, by the same rules.

    Example::

        slopes = torch.rand(8, device="cuda")
        def alibi(score, b, h, q_idx, kv_idx):
            return score + slopes[h] * (kv_idx - q_idx)

        q, k, v = torch.randn(3, 2, 8, 256, 64, device="cuda", dtype=torch.bfloat16)
        o = tkq.flex_attention(q, k, v, alibi)  # (2, 8, 256, 64) bfloat16
    """
    if ops.traced() or autocast.on():
        query, key, value = autocast.lowered(query, key, value)
    scale, enable_gqa, return_lse = options(scale, enable_gqa, return_lse)
    want_lse = _wanted(return_lse, return_aux)
    check_operands(query, key, value, enable_gqa)
    given = (query, key, value), score_mod, block_mask, scale_of(scale, query.shape[3])
    check.refuse_tangent(OP, query=query, key=key, value=value)
    o, lse = (_traced if ops.route(query, key, value) == "op" else _eager)(*given, want_lse)
    if return_aux is not None:
        return o, _torchs.AuxOutput(lse=lse if return_aux.lse else None, max_scores=None)
    return (o, lse) if return_lse else o


def _traced(tensors, score_mod, block_mask, scale, want_lse):
    of_mask = tensors_of(block_mask, *tensors[:2])
    score_mod = None if score_mod is None else check_function("score_mod", score_mod)
    mask_mod = None if block_mask is None else block_mask.mask_mod
    mask_mod = None if mask_mod is None or mask_mod is _torchs.noop_mask else check_function("mask_mod", mask_mod)
    return traced_ops.attention(*tensors, (score_mod, mask_mod), of_mask, scale, want_lse)


def _eager(tensors, score_mod, block_mask, scale, want_lse):
    mask_mod, blocks = blocks_of(block_mask, *tensors[:2])
    score = None if score_mod is None else trace("score_mod", score_mod)
    mask = None if mask_mod in (None, _torchs.noop_mask) else trace("mask_mod", mask_mod)
    check_captured("score_mod", score, tensors[0])
    check_captured("mask_mod", mask, tensors[0])
    call = Call(*tensors, score, mask, blocks, scale)
    learned = learned_of(call)
    mode = ops.route(*call[:3], *learned)
    if mode == "op":
        raise NotImplementedError(f"{OP}: score_mod: captured subclasses of tensors are not supported")
    if mode == "direct":
        return forward(call, want_lse)
    if call.score is not None:
        _refuse_slopes(call.score, learned)
    return _Recorded.apply(*call[:3], call, *learned)


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


def _record(ctx, q, k, v, call, *learned):
    """What a gradient needs is saved, captured tensors and lists among it: none of them may change until then. learned:
    those of the captured tensors that may require a gradient."""
    o, lse = forward(call, True)
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
    rows = torch.zeros_like(o) if do is None else do, o, lse, dlse
    call, needed = ctx.call._replace(q=q, k=k, v=v), ctx.needs_input_grad
    found, learned = gradients(call, rows, needed[:3], tuple(
        slot for slot, need in zip(ctx.slots, needed[4:]) if need))
    learned = iter(learned)
    return (*(x if need else None for x, need in zip(found, needed)), None,
            *(next(learned) if need else None for need in needed[4:]))


_Recorded = ops.eager_function("FlexAttention", forward=_record, backward=_back, of=OP)


def _wanted(return_lse, return_aux):
    if return_aux is None:
        return return_lse
    if not isinstance(return_aux, _torchs.AuxRequest):
        raise TypeError(f"{OP}: return_aux is {return_aux!r}, allowed are None and torch's AuxRequest")
    if return_lse:
        raise ValueError(f"{OP}: return_lse and return_aux: allowed is one of them")
    if return_aux.max_scores:
        raise NotImplementedError(f"{OP}: return_aux: max_scores is not supported, lse is")
    return return_aux.lse
