"""What a caller may pass to fft_conv."""
from typing import NamedTuple, Optional

from torch import Tensor

from tkq.convolution.fft.spec import MOST_TOKENS
from tkq.runtime import arguments
from tkq.runtime.call import check

OP = "fft_conv"
MOST = 1 << 24  # of heads, and of sequences
_tensors = arguments.checker(OP, "u", "k", "d", "pre_gate", "post_gate")
options = arguments.checker(OP, "causal", "precision")


class Call(NamedTuple):
    """The arguments of a call, in their order."""

    u: Tensor
    k: Tensor
    d: Optional[Tensor] = None
    causal: bool = True
    pre_gate: Optional[Tensor] = None
    post_gate: Optional[Tensor] = None
    precision: str = "half"


def check_call(call: Call) -> None:
    """Raises what fft_conv promises of its tensors."""
    u, k, d, causal, pre, post, precision = call
    options(causal, precision)  # where no public function has looked at them
    _tensors(u, k, d, pre, post)
    check.rank(f"{OP}: u", u, 3)
    B, H, L = u.shape
    check.shape(f"{OP}: k", k, (H, None))
    if d is not None:
        check.shape(f"{OP}: d", d, (H,))
    for name, gate in (("pre_gate", pre), ("post_gate", post)):
        if gate is not None:
            check.shape(f"{OP}: {name}", gate, (B, H, L))
            if gate.dtype != u.dtype:
                raise TypeError(f"{OP}: {name} is {gate.dtype}, u is {u.dtype}; allowed is the same")
    check.same_device(u=u, k=k, d=d, pre_gate=pre, post_gate=post)
    if B > MOST or H > MOST:
        raise NotImplementedError(f"{OP}: u: has {B} sequences and {H} heads, supported are up to {MOST}")
    if L > MOST_TOKENS:
        raise NotImplementedError(f"{OP}: u: has {L} tokens, supported are up to {MOST_TOKENS}")
