"""tkq.flex_attention: what PyTorch sees."""
from collections.abc import Callable
from typing import Optional

from torch import Tensor
from torch.nn.attention import flex_attention as _torchs

from tkq.attention.flex.attend import NOTHING, Asked, attend, given_of, recorded_again, records
from tkq.attention.flex.check import OP, check_operands, options, scale_of
from tkq.attention.flex.launch import calls
from tkq.runtime.call import autocast, check, ops


def flex_attention(query: Tensor, key: Tensor, value: Tensor, score_mod: Optional[Callable] = None, block_mask=None,
                   scale: Optional[float] = None, enable_gqa: bool = False, return_lse: bool = False,
                   kernel_options: Optional[dict] = None, *, return_aux=None):
    """Exact attention with a score function and a mask of the user's own: torch's
    ``torch.nn.attention.flex_attention.flex_attention``, called the same way, with the same functions and block masks.

        softmax(score_mod(scale * query @ key.T, b, h, q_idx, kv_idx) where mask_mod(b, h, q_idx, kv_idx)) @ value

    Args:
        query: (B, H, Sq, D), bfloat16 or float16, D a multiple of 8 up to 256; any strides: where TMA cannot take them
            it is copied.
        key, value: (B, Hk, Sk, D) and (B, Hk, Sk, Dv), as query; Dv need not be D.
        score_mod: takes a score, float32, and its batch, head, query and key, int32, all tensors of no dimension; gives
            the new score. It is traced: pointwise operations of ATen, and elements of captured tensors of any dtype but
            float64 and complex, by any integers (negative ones count from the end, others outside are taken as the
            nearest inside). Numbers of 16 bits are float32 there, and not rounded in between. Captured numbers are
            arguments of the kernel, if not very large or small: another value compiles nothing. -inf hides a key.
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
        NotImplementedError: a head_dim that is not supported; an operation that no kernel has,
            by its name; blocks of other sizes; a derivative that there is not, by its operation; gradients of captured
            tensors where ``torch.use_deterministic_algorithms`` is on; max_scores of return_aux.
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
    traced, want_lse = ops.traced(), return_lse
    if traced or autocast.on():
        query, key, value = autocast.lowered(query, key, value)
    if return_aux is not None:
        scale, enable_gqa, return_lse = options(scale, enable_gqa, return_lse)
        want_lse = _wanted(return_lse, return_aux)
    found, given, tensors = None, NOTHING, (query, key, value)
    if not traced:
        recorded = type(want_lse) is bool and records(tensors)
        given = given_of(tensors, (recorded or want_lse, scale, enable_gqa), score_mod, None, block_mask)
        found = given[0] and (recorded_again(tensors, given[0]) if recorded else calls.take(*given[0]))
    if not found:
        scale, enable_gqa, want_lse = options(scale, enable_gqa, want_lse)
        check_operands(query, key, value, enable_gqa)
        check.refuse_tangent(OP, query=query, key=key, value=value)
        asked = Asked(score_mod, None, block_mask, scale_of(scale, query.shape[3]), OP, given)
        found = attend(tensors, asked, want_lse)
    o, lse = found
    if return_aux is not None:
        return o, _torchs.AuxOutput(lse=lse if return_aux.lse else None, max_scores=None)
    return (o, lse) if return_lse else o


def _wanted(return_lse, return_aux):
    if not isinstance(return_aux, _torchs.AuxRequest):
        raise TypeError(f"{OP}: return_aux is {return_aux!r}, allowed are None and torch's AuxRequest")
    if return_lse:
        raise ValueError(f"{OP}: return_lse and return_aux: allowed is one of them")
    if return_aux.max_scores:
        raise NotImplementedError(f"{OP}: return_aux: max_scores is not supported, lse is")
    return return_aux.lse
