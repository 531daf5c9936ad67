"""tkq's attention under the signatures of torch's flash ops, and the rules by which a call goes elsewhere.

Each function here has the arguments of an aten op and returns what it returns, or None where tkq does not take the
call: `tkq.integrations.sdpa` then calls the kernel that was there before. They run below autograd, which torch's ops
have of their own, on plain CUDA tensors.
"""
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from ..attention import ops, varlen_ops
from ..attention.arguments import Lengths, Options
from ..attention.backward import ops as backward_ops
from ..attention.backward import varlen_ops as backward_varlen_ops
from ..attention.common.operands import Gradients, Operands
from ..runtime.call import check
from ..runtime.device import arch

DTYPES = (torch.bfloat16, torch.float16)
MOST_COLUMNS = 256


class Call(NamedTuple):
    """What a call of a flash op asks for, but for its tensors. left, right: limits of a window, None or -1 for none.
    cu_q, cu_k, used_k: of packed sequences. paged, alibi: were such tensors given?"""

    dropout_p: float = 0.0
    causal: bool = False
    debug: bool = False
    scale: Optional[float] = None
    left: Optional[int] = None
    right: Optional[int] = None
    cu_q: Optional[Tensor] = None
    cu_k: Optional[Tensor] = None
    used_k: Optional[Tensor] = None
    paged: bool = False
    alibi: bool = False


def why_not(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Optional[str]:
    """Why tkq does not take this call; None where it does. q: (B, Sq, H, D), or packed (total, H, D); k, v likewise.

    Nothing here looks at a value on the GPU."""
    return _of_options(call) or _of_operands(q, k, v) or (
        _of_dense(q, k, call) if call.cu_q is None and call.cu_k is None else _of_packed(q, call))


def _of_options(call):
    if call.dropout_p != 0.0:
        return "dropout"
    if call.debug:
        return "a debug mask"
    if call.alibi:
        return "slopes (alibi)"
    if call.paged:
        return "keys and values in pages"
    if call.scale is not None and not 0 < call.scale < check.FLOAT32_END:
        return f"a scale of {call.scale}"
    return None


def _of_operands(q, k, v):
    if q.dtype not in DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        return f"types {q.dtype}, {k.dtype}, {v.dtype}"
    if not (q.device == k.device == v.device):
        return "several devices"
    if not (q.dim() == k.dim() == v.dim()) or k.shape[:-1] != v.shape[:-1] or q.shape[-1] != k.shape[-1]:
        return "shapes that do not go together"
    for x in (q, v):
        if x.shape[-1] % 8 or not 8 <= x.shape[-1] <= MOST_COLUMNS:
            return f"heads of {x.shape[-1]} columns"
    if not (q.numel() and k.numel()):
        return "nothing to compute"
    if q.shape[-2] % k.shape[-2]:
        return f"{q.shape[-2]} heads on {k.shape[-2]}"
    if not all(backward_ops.takes(x) for x in (q, k, v)):
        return "strides or an address that are no multiples of 16 bytes"
    return None


def _of_dense(q, k, call):
    if q.dim() != 4 or q.shape[0] != k.shape[0]:
        return "shapes that do not go together"
    if call.used_k is not None:
        return "lengths of a dense batch"
    if call.causal and q.shape[1] != k.shape[1]:
        return "causal with Sq != Sk: torch's mask begins at the top left, tkq's ends at the bottom right"
    return None


def _of_packed(q, call):
    if call.cu_q is None or call.cu_k is None or q.dim() != 3:
        return "shapes that do not go together"
    for x in (call.cu_q, call.cu_k, call.used_k):
        if x is not None and (x.dtype != torch.int32 or x.dim() != 1 or not x.is_contiguous() or x.device != q.device):
            return "lengths that are not int32, contiguous and on the queries' device"
    if call.cu_q.shape != call.cu_k.shape or call.cu_q.shape[0] < 2:
        return "lengths that do not go together"
    if call.used_k is not None and call.used_k.shape[0] != call.cu_q.shape[0] - 1:
        return "lengths that do not go together"
    return None


def on_hopper(x: Tensor) -> bool:
    return x.is_cuda and arch.capability(x.device) == arch.HOPPER


def _takes(q, k, v, call) -> bool:
    return on_hopper(q) and why_not(q, k, v, call) is None


def _options(call: Call) -> Options:
    left, right = (-1 if n is None or n < 0 else n for n in (call.left, call.right))
    return Options(call.causal or right == 0, call.scale, left, -1 if call.causal or right == 0 else right)


def _rest(q):
    """(the random state, what is unused, the debug mask) of torch's results: there is no dropout, so that nothing reads
    them."""
    empty = torch.empty
    return (empty(2, dtype=torch.uint64, device=q.device), empty((), dtype=torch.uint64, device=q.device),
            empty(0, dtype=q.dtype, device=q.device))


def _transposed(*tensors):
    """(B, H, S, D) to (B, S, H, D) and back."""
    return tuple(x.transpose(1, 2) for x in tensors)


# ---- forward -------------------------------------------------------------------------------------------------------


def _forward(q, k, v, call, longest, out=None):
    """(out, lse), into ``out`` where it is given. longest: the greatest numbers of queries and keys, of packed
    sequences."""
    if out is None:
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
    if call.cu_q is None:
        lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
        ops.run(Operands(q, k, v, out, lse), _options(call))
    else:
        lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
        lengths = Lengths(call.cu_q, call.cu_k, None, call.used_k, *longest)
        varlen_ops.run(Operands(q, k, v, out, lse), lengths, _options(call))
    return out, lse


def sdpa_forward(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    """aten::_scaled_dot_product_flash_attention. The result has the query's order of strides, as its meta function
    says."""
    q, k, v = _transposed(query, key, value)
    call = Call(dropout_p, is_causal, return_debug_mask, scale)
    if not _takes(q, k, v, call) or v.shape[-1] != q.shape[-1]:
        return None
    out = torch.empty_like(query)
    _, lse = _forward(q, k, v, call, None, out.transpose(1, 2))
    return out, lse, None, None, query.shape[2], key.shape[2], *_rest(query)


def flash_forward(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *,
                  scale=None, window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None,
                  block_table=None, num_splits=None):
    """aten::_flash_attention_forward. num_splits is a hint how to spread the work: results do not depend on it."""
    call = Call(dropout_p, is_causal, return_debug_mask, scale, window_size_left, window_size_right, cum_seq_q,
                cum_seq_k, seqused_k, block_table is not None, alibi_slopes is not None)
    if not _takes(query, key, value, call):
        return None
    return *_forward(query, key, value, call, (max_q, max_k)), *_rest(query)


def flash_forward_into(out, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
                       return_debug_mask, *, scale=None, window_size_left=None, window_size_right=None, seqused_k=None,
                       alibi_slopes=None, block_table=None, num_splits=None):
    """aten::_flash_attention_forward_no_dropout_inplace."""
    call = Call(dropout_p, is_causal, return_debug_mask, scale, window_size_left, window_size_right, cum_seq_q,
                cum_seq_k, seqused_k, block_table is not None, alibi_slopes is not None)
    fits = out.dtype == query.dtype and out.shape == (*query.shape[:-1], value.shape[-1]) and backward_ops.takes(out)
    if not fits or not _takes(query, key, value, call):
        return None
    return _forward(query, key, value, call, (max_q, max_k), out)[1]


# ---- backward ------------------------------------------------------------------------------------------------------


def _backward(do, q, k, v, o, lse, call, longest, gradients):
    """gradients, written: dq, dk and dv. What either forward saved will do: o and the natural log-sum-exp are the same
    whichever computed them."""
    if not backward_ops.takes(do):
        do = do.clone(memory_format=torch.contiguous_format)
    deterministic, tensors = torch.are_deterministic_algorithms_enabled(), (do, q, k, v, o, lse, None)
    if call.cu_q is None:
        backward_ops.run(tensors, gradients, _options(call), deterministic)
    else:
        backward_varlen_ops.run(tensors, gradients, Lengths(call.cu_q, call.cu_k, None, None, *longest),
                                _options(call), deterministic)
    return gradients


def _takes_gradient(do, q, k, v, o, lse, call):
    rows = (q.shape[0], q.shape[2], q.shape[1]) if call.cu_q is None else (q.shape[1], q.shape[0])
    return (_takes(q, k, v, call) and o.dtype == do.dtype == q.dtype and o.shape == do.shape
            and o.shape == (*q.shape[:-1], v.shape[-1]) and backward_ops.takes(o) and lse.dtype == torch.float32
            and lse.shape == rows)


def sdpa_backward(grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
                  philox_seed, philox_offset, *, scale=None):
    """aten::_scaled_dot_product_flash_attention_backward. Gradients have the order of strides of what they are of."""
    do, q, k, v, o = _transposed(grad_out, query, key, value, out)
    call = Call(dropout_p, is_causal, scale=scale)
    if cum_seq_q is not None or not _takes_gradient(do, q, k, v, o, logsumexp, call):
        return None
    gradients = tuple(torch.empty_like(x) for x in (query, key, value))
    _backward(do, q, k, v, o, logsumexp, call, None, Gradients(*_transposed(*gradients)))
    return gradients


def flash_backward(grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p,
                   is_causal, rng_state, unused, *, scale=None, window_size_left=None, window_size_right=None):
    """aten::_flash_attention_backward."""
    call = Call(dropout_p, is_causal, False, scale, window_size_left, window_size_right, cum_seq_q, cum_seq_k)
    if not _takes_gradient(grad_out, query, key, value, out, logsumexp, call):
        return None
    gradients = Gradients(*(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)))
    return tuple(_backward(grad_out, query, key, value, out, logsumexp, call, (max_q, max_k), gradients))


OPS = {
    "_scaled_dot_product_flash_attention": sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": sdpa_backward,
    "_flash_attention_forward": flash_forward,
    "_flash_attention_forward_no_dropout_inplace": flash_forward_into,  # torch 2.13 has it
    "_flash_attention_backward": flash_backward,
}
