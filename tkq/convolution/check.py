"""What a caller may pass to causal_conv1d."""
from typing import NamedTuple, Optional

from torch import Tensor

from tkq.convolution.spec import WIDTHS
from tkq.runtime import arguments
from tkq.runtime.call import check

OP = "causal_conv1d"
MOST = 65535  # sequences: blocks of a launch along a dimension of the grid
_tensors = arguments.checker(OP, "x", "weight", "bias", "initial_state", "cu_seqlens")
options = arguments.checker(OP, "activation", "output_final_state")


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
    if W not in WIDTHS:
        raise NotImplementedError(f"{OP}: weight: has {W} taps, supported are {WIDTHS[0]} to {WIDTHS[-1]}")
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


def _sequences(batch, cu):
    if cu is None:
        return batch
    check.rank(f"{OP}: cu_seqlens", cu, 1)
    if not len(cu) or batch != 1:
        raise ValueError(f"{OP}: cu_seqlens: has {len(cu)} numbers, allowed is one more than sequences; x has {batch} "
                         "rows, allowed with cu_seqlens is 1")
    return len(cu) - 1
