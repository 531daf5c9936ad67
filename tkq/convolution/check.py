"""What a caller may pass to causal_conv1d."""
from typing import NamedTuple, Optional

from torch import Tensor

from tkq.convolution.spec import WIDTHS
from tkq.runtime import arguments
from tkq.runtime.call import check

OP, STEP = "causal_conv1d", "causal_conv1d_step"
MOST_CHANNELS = 1 << 28
MOST = 65535  # sequences: blocks of a launch along a dimension of the grid
_tensors = arguments.checker(OP, "x", "weight", "bias", "initial_state", "cu_seqlens")
_step_tensors = arguments.checker(STEP, "x", "conv_states", "weight", "bias", "cache_indices", "out")
options = arguments.checker(OP, "activation", "output_final_state")
step_options = arguments.checker(STEP, "activation")


class Call(NamedTuple):
    """The tensors of a call."""

    x: Tensor
    weight: Tensor
    bias: Optional[Tensor] = None
    initial_state: Optional[Tensor] = None
    cu_seqlens: Optional[Tensor] = None


def check_call(call: Call) -> None:
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
    check.same_device(**call._asdict())
    sequences = _sequences(B, cu)
    if B > MOST:
        raise NotImplementedError(f"{OP}: x: has {B} sequences, supported are up to {MOST}; with cu_seqlens any number")
    if state is not None:
        check.shape(f"{OP}: initial_state", state, (sequences, C, W - 1))


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


def _sequences(batch, cu):
    if cu is None:
        return batch
    check.rank(f"{OP}: cu_seqlens", cu, 1)
    if not len(cu) or batch != 1:
        raise ValueError(f"{OP}: cu_seqlens: has {len(cu)} numbers, allowed is one more than sequences; x has {batch} "
                         "rows, allowed with cu_seqlens is 1")
    return len(cu) - 1
