"""What a caller may pass to causal_conv1d."""
from typing import NamedTuple, Optional

from torch import Tensor

from tkq.convolution.spec import HEADS, WIDTHS
from tkq.runtime import arguments
from tkq.runtime.call import check, memory

OP, STEP = "causal_conv1d", "causal_conv1d_step"
MOST_CHANNELS = 1 << 28
MOST = 65535  # sequences: blocks of a launch along a dimension of the grid
_tensors = arguments.checker(OP, "x", "weight", "bias", "initial_state", "cu_seqlens")
_step_tensors = arguments.checker(STEP, "x", "conv_states", "weight", "bias", "cache_indices", "out")
_numbers = arguments.checker(OP, "seq_idx")
options = arguments.checker(OP, "activation", "output_final_state", "norm_heads", "head_dim")
step_options = arguments.checker(STEP, "activation")


class Call(NamedTuple):
    """The tensors of a call. cu_seqlens of two dimensions is what is called seq_idx."""

    x: Tensor
    weight: Tensor
    bias: Optional[Tensor] = None
    initial_state: Optional[Tensor] = None
    cu_seqlens: Optional[Tensor] = None


def check_call(call: Call, norm_heads: int = 0, head_dim: int = 128) -> None:
    """Raises what causal_conv1d promises of its tensors."""
    _tensors(*call)
    x, weight, bias, state, cu = call
    check.rank(f"{OP}: x", x, 3)
    check.rank(f"{OP}: weight", weight, 2)
    (B, _, C), W = x.shape, weight.shape[1]
    check.shape(f"{OP}: weight", weight, (C, W))
    if not WIDTHS[0] <= W <= WIDTHS[-1]:
        raise NotImplementedError(f"{OP}: weight: has {W} taps, supported are {WIDTHS[0]} to {WIDTHS[-1]}")
    if C > MOST_CHANNELS:
        raise NotImplementedError(f"{OP}: x: has {C} channels, supported are up to {MOST_CHANNELS}")
    if not C:
        raise ValueError(f"{OP}: x: has no channels, allowed are 1 and more")
    if bias is not None:
        check.shape(f"{OP}: bias", bias, (C,))
    named = call._asdict()
    if cu is not None and cu.dim() == 2:
        named["seq_idx"] = named.pop("cu_seqlens")
    check.same_device(**named)
    refuse_states(cu, state, False)
    if norm_heads:
        _heads(C, norm_heads, head_dim)
    count = _sequences(x, cu)
    if B > MOST:
        raise NotImplementedError(f"{OP}: x: has {B} sequences, supported are up to {MOST}; with cu_seqlens any number")
    if state is not None:
        check.shape(f"{OP}: initial_state", state, (count, C, W - 1))


def sequences(call: Call, seq_idx, output_final_state: bool):
    """cu_seqlens, or seq_idx in its place, looked at as far as the two go together."""
    if isinstance(call.cu_seqlens, Tensor) and call.cu_seqlens.dim() != 1:
        _tensors(*call)
        check.rank(f"{OP}: cu_seqlens", call.cu_seqlens, 1)
    if seq_idx is None:
        return call.cu_seqlens
    _numbers(seq_idx)
    check.rank(f"{OP}: seq_idx", seq_idx, 2)
    if call.cu_seqlens is not None:
        raise ValueError(f"{OP}: seq_idx is given, allowed is cu_seqlens None")
    refuse_states(seq_idx, call.initial_state, output_final_state)
    return seq_idx


def _heads(C, heads, head):
    if head not in HEADS[1:]:
        raise NotImplementedError(f"{OP}: head_dim: is {head}, supported are {' and '.join(map(str, HEADS[1:]))}")
    if heads * head > C:
        raise ValueError(f"{OP}: norm_heads: {heads} heads of {head} channels, allowed are as many as x's {C} channels "
                         "hold")
    if C % 4:
        raise NotImplementedError(f"{OP}: x: has {C} channels, supported with norm_heads are multiples of 4")


def refuse_states(cu, state, output_final_state: bool) -> None:
    """Raises where there are states beside seq_idx."""
    if cu is not None and cu.dim() == 2 and (state is not None or output_final_state):
        raise ValueError(f"{OP}: seq_idx is given, allowed are initial_state None and output_final_state False")


class StepCall(NamedTuple):
    """What causal_conv1d_step takes, but for out, in the order of its op's arguments."""

    x: Tensor
    conv_states: Tensor
    weight: Tensor
    bias: Optional[Tensor] = None
    activation: Optional[str] = None
    cache_indices: Optional[Tensor] = None


def check_step(call: StepCall, out=None) -> None:
    """Raises what causal_conv1d_step promises of its tensors."""
    x, pool, weight, bias, _, indices = call
    _step_tensors(x, pool, weight, bias, indices, out)
    check.rank(f"{STEP}: x", x, 2, 3)
    check.rank(f"{STEP}: weight", weight, 2)
    N, C, W = x.shape[0], x.shape[-1], weight.shape[1]
    check.shape(f"{STEP}: weight", weight, (C, W))
    if not WIDTHS[0] <= W <= WIDTHS[-1]:
        raise NotImplementedError(f"{STEP}: weight: has {W} taps, supported are {WIDTHS[0]} to {WIDTHS[-1]}")
    if bias is not None:
        check.shape(f"{STEP}: bias", bias, (C,))
    check.shape(f"{STEP}: conv_states", pool, (None, C, None))
    if pool.shape[2] < W - 1:
        raise ValueError(f"{STEP}: conv_states: has {pool.shape[2]} columns, allowed are {W - 1} and more")
    check.settled(f"{STEP}: conv_states", pool)
    check.refuse_overlap(STEP, conv_states=pool)
    check.same_device(x=x, conv_states=pool, weight=weight, bias=bias, cache_indices=indices, out=out)
    if indices is not None:
        check.shape(f"{STEP}: cache_indices", indices, (N,))
    elif pool.shape[0] < N:
        raise ValueError(f"{STEP}: conv_states: has {pool.shape[0]} rows for {N} sequences; allowed without "
                         "cache_indices are at least as many")
    if out is not None:
        check.shape(f"{STEP}: out", out, tuple(x.shape))
        if out.dtype != x.dtype:
            raise TypeError(f"{STEP}: out is {out.dtype}, results are {x.dtype}")


def check_written(call: StepCall, out=None) -> None:
    """Raises where what a step writes to must not be written to."""
    check.refuse_inference(STEP, conv_states=call.conv_states)
    if out is not None:
        check.refuse_overlap(STEP, out=out)
        check.refuse_inference(STEP, out=out)
    x, pool, weight, bias, _, indices = call
    memory.refuse_shared(STEP, {"conv_states": pool, "out": out},
                         dict(x=x, weight=weight, bias=bias, cache_indices=indices))


def _sequences(x, cu):
    batch = x.shape[0]
    if cu is None:
        return batch
    if cu.dim() == 2:
        check.shape(f"{OP}: seq_idx", cu, tuple(x.shape[:2]))
        return batch
    check.rank(f"{OP}: cu_seqlens", cu, 1)
    if not cu.shape[0] or batch != 1:
        raise ValueError(f"{OP}: cu_seqlens: has {cu.shape[0]} numbers, allowed is one more than sequences; x has "
                         f"{batch} rows, allowed with cu_seqlens is 1")
    return cu.shape[0] - 1
