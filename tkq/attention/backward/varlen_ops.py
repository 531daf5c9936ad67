"""The gradients of flash_attn_varlen: from torch tensors to a launch, and what PyTorch's compiler sees of it."""
import math
from typing import Optional

import torch
from torch import Tensor

from tkq.attention.arguments import (
    PLAIN,
    Lengths,
    Options,
    check_first,
    check_layouts,
    check_sequences,
    refuse_out_of_range,
)
from tkq.attention.backward.ops import as_tensors, check_gradient_of, launcher_of, like, only
from tkq.attention.backward.plan import packed_class
from tkq.attention.backward.spec import WIDTHS
from tkq.attention.common.layout import takes
from tkq.attention.common.operands import BackwardOperands, Gradients
from tkq.attention.wide.backward import launch as wide
from tkq.reference import attention_backward as reference_attention
from tkq.runtime.call import check, ops

_launchers: dict = {}  # as backward_ops._launchers
OP = "attention_varlen_backward"


def attention_varlen_backward(tensors: tuple, sinks: Optional[Tensor], lengths: tuple, options: tuple = PLAIN, *,
                              deterministic: bool = False, needs: tuple = (True, True, True, True)):
    """The gradients of ``flash_attn_varlen``, from what it took and gave.

    Args:
        tensors: (do, q, k, v, o, lse, dlse).
            do: the gradient of o. Where its strides do not suit TMA it is copied.
            q: (total_q, H, D). k: (total_k, Hk, D). v: (total_k, Hk, Dv). o: (total_q, H, Dv).
            lse: (H, total_q) float32, of any strides. dlse: its gradient, likewise, or None.
        sinks: (H,) or None. lengths, options: tuples, as ``Lengths`` and ``Options``. cu_seqlens and seqused may have
            any values, as of ``flash_attn_varlen``; where the first is more than 0, gradients of the rows before it are
            not written.
        deterministic: as ``attention_backward``; without, dq is added up in varying order at D 64 too. needs: which of
            the four are wanted.

    Returns:
        (dq, dk, dv, dsinks); None for what is not wanted. Rows that are not in use, or of no sequence, have a gradient
        of 0, and no part in that of the sinks.

    Raises:
        As ``flash_attn_varlen``; all name the argument.
    """
    lengths, options = Lengths(*lengths), Options(*options)
    needs = (*needs[:3], bool(needs[3]) and sinks is not None)
    if not any(needs):
        return (None,) * 4
    if ops.direct(*tensors, sinks, *lengths[:4]):
        return (_cuda if tensors[1].is_cuda else _cpu)(tensors, sinks, lengths, options, deterministic, needs)
    check.refuse_gradient(OP, **dict(zip(BackwardOperands._fields, tensors)), sinks=sinks)
    _check(tensors, sinks, lengths, options)
    return only(_op(*tensors, sinks, *lengths, *options, deterministic, *needs), needs)


def _check(tensors, sinks, lengths, options):
    check_gradient_of(OP, tensors, sinks, options, 3)
    check_sequences(OP, tensors[1], lengths)


def _check_all(tensors, sinks, lengths, options):
    """What ``_check`` does, and what TMA cannot take."""
    _check(tensors, sinks, lengths, options)
    check_layouts(OP, **dict(zip(("q", "k", "v", "o"), tensors[1:5])), **lengths._asdict())


# ---- CUDA ------------------------------------------------------------------------------------------


def _cuda(tensors, sinks, lengths, options, deterministic, needs):
    do, q, k, v, *rest = tensors
    seqused_q, seqused_k = lengths.seqused_q, lengths.seqused_k
    try:
        count = lengths.cu_seqlens_q.shape[0] - 1
        if not (q.numel() and k.numel() and v.numel()) or count <= 0:
            _check(tensors, sinks, lengths, options)
            return _empty(tensors, sinks, lengths, needs)
        if q.shape[1] % k.shape[1] or not all(x is None or x.shape[0] == count for x in (seqused_q, seqused_k)):
            raise ValueError  # _check says which
        refuse_out_of_range(options.softmax_scale, options.softcap)
        fits = takes(do)
        if not (fits and seqused_q is None and seqused_k is None):  # before anything is copied, or filled with zeros
            _check_all(tensors, sinks, lengths, options)
        do = do if fits else do.clone(memory_format=torch.contiguous_format)
        # rows that are not in use belong to no task
        new_q, new_k = (torch.empty if used is None else torch.zeros for used in (seqused_q, seqused_k))
        dq = new_q(q.shape, dtype=q.dtype, device=q.device) if needs[0] else None
        dk, dv = (new_k(x.shape, dtype=q.dtype, device=q.device) for x in (k, v))
        statistics = run((do, q, k, v, *rest), (dq, dk, dv), lengths, options, deterministic)
    except Exception:  # the words for a user are found only when something is wrong
        _check_all(tensors, sinks, lengths, options)
        raise
    dsinks = sinks_gradient(sinks, *statistics()) if needs[3] else None
    return dq, dk if needs[1] else None, dv if needs[2] else None, dsinks


def _empty(tensors, sinks, lengths, needs):
    """No queries, or no keys to see: nothing to launch. The log-sum-exp of a row is its sink."""
    _, q, k, v, _, lse, dlse = tensors
    zeros = [x.new_zeros(x.shape) if needed else None for x, needed in zip((q, k, v), needs)]
    if not needs[3]:
        return *zeros, None
    of_rows = torch.zeros_like(lse) if dlse is None else dlse.masked_fill(~_in_use(lengths, q.shape[0]), 0.0)
    return *zeros, reference_attention.sinks_gradient(sinks, lse[None], of_rows[None])


def _in_use(lengths, rows):
    """(rows,) bool: is the row one of a sequence, and in use?"""
    cu, used = lengths.cu_seqlens_q, lengths.seqused_q
    row, count = torch.arange(rows, dtype=cu.dtype, device=cu.device), cu.shape[0] - 1
    cu = cu.clamp(0, rows).cummax(0).values  # as the kernels have it where cu falls
    sequence = torch.searchsorted(cu, row, right=True) - 1
    inside = (sequence >= 0) & (sequence < count)
    if used is None or count < 1:
        return inside
    sequence = sequence.clamp(0, count - 1)
    return inside & (row - cu[sequence] < used[sequence])


def run(tensors: BackwardOperands, gradients: Gradients, lengths: Lengths, options: Options = PLAIN,
        deterministic=False, config=None):
    """Launch the kernels into gradients (dq or None, dk, dv), from (do, q, k, v, o, lse, dlse), with no more checks
    than the compiled function makes.

    config: a BackwardConfig instead of the plan's: for tests and tuning.
    Returns a function that gives the statistics of the rows in their slots: -lse * log2(e) and dlse - rowsum(o * do),
    (H, slots) each, and -inf and 0 for rows that see no key and where there is no row."""
    _, q, k, v, _, _, dlse = tensors
    rows, heads, head_dim = q.shape
    if head_dim > WIDTHS[-1]:
        return _wide(tensors, gradients, lengths, options, config)
    causal, scale, left, right, softcap = options
    left, right = left if left < k.shape[0] - 1 else -1, 0 if causal else right if right < rows - 1 else -1
    seqused_q, seqused_k = lengths.seqused_q is None, lengths.seqused_k is None
    key = (q.dtype, head_dim, v.shape[2], left < 0, right < 0, softcap == 0.0, gradients[0] is None, dlse is None,
           deterministic, packed_class(lengths.max_seqlen_k), q.get_device(), config, heads // k.shape[1], seqused_q,
           seqused_k)
    launcher = _launchers.get(key)
    if launcher is None:
        launcher = _launchers[key] = launcher_of(q.device, key, varlen=True, seqused_q=not seqused_q,
                                                 seqused_k=not seqused_k)
    kernels, spec, config, num_sms = launcher
    slots = rows // config.tile + lengths.cu_seqlens_q.shape[0]  # see tkq.attention.common.sequences
    workspace = torch.empty(heads * config.workspace_floats(spec, slots * config.tile), dtype=torch.float32,
                            device=q.device)
    kernels(tuple(tensors), tuple(gradients), workspace, lengths[:4],
            (head_dim**-0.5 if scale is None else scale, softcap, left, right, num_sms))

    def statistics():
        of_tiles = workspace[:2 * heads * slots * config.tile].view(heads, slots, 2, config.tile)
        return of_tiles[:, :, 0], of_tiles[:, :, 1]

    return statistics


def _wide(tensors, gradients, lengths, options, config):
    """``run`` of heads of more columns: rows that are not in use have statistics like any other, so far."""
    stats = wide.run(tensors, gradients, options, lengths, config)

    def statistics():
        outside = ~_in_use(lengths, tensors[1].shape[0])
        return stats[0].masked_fill(outside, -math.inf)[:, None], stats[1].masked_fill(outside, 0.0)[:, None]

    return statistics


def sinks_gradient(sinks, minus_lse, of_rows):
    """Of the logits (H,), from what ``run`` knows of the rows."""
    p = torch.exp2(sinks.float()[:, None, None] / math.log(2) + minus_lse)
    return (p * of_rows).sum((1, 2)).to(sinks.dtype)


# ---- CPU, tracing ----------------------------------------------------------------------------------


def _cpu(tensors, sinks, lengths, options, deterministic, needs):
    _check(tensors, sinks, lengths, options)
    if tensors[1].is_meta:  # no lengths to look at
        return only(like(tensors, sinks, needs), needs)
    check_first(OP, lengths)
    return only(reference_attention.flash_attn_varlen_backward(*tensors, lengths[:4], options, sinks), needs)


def _from_flat(flat):
    """What ``_cuda`` takes, of the op's arguments."""
    return flat[:7], flat[7], Lengths(*flat[8:14]), Options(*flat[14:19]), flat[19], flat[20:]


def _op_cuda(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, dlse: Optional[Tensor],
             sinks: Optional[Tensor], cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, seqused_q: Optional[Tensor],
             seqused_k: Optional[Tensor], max_seqlen_q: int, max_seqlen_k: int, causal: bool,
             softmax_scale: Optional[float], left: int, right: int, softcap: float, deterministic: bool, need_dq: bool,
             need_dk: bool, need_dv: bool, need_dsinks: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
    options = Options(causal, softmax_scale, left, right, softcap)
    return as_tensors(_cuda((do, q, k, v, o, lse, dlse), sinks, lengths, options, deterministic,
                            (need_dq, need_dk, need_dv, need_dsinks)), q)


def _op_cpu(*flat):
    return as_tensors(_cpu(*_from_flat(flat)), flat[1])


def _op_fake(*flat):
    tensors, sinks, *_, needs = _from_flat(flat)
    return like(tensors, sinks, needs)


_op = ops.torch_op("flash_attn_varlen_backward", cuda=_op_cuda, cpu=_op_cpu, fake=_op_fake)
