"""What a caller may pass to scan."""
from typing import NamedTuple, Optional

from torch import Tensor

from tkq.runtime import arguments
from tkq.runtime.call import check

OP = "scan"
MOST_COLUMNS = 1 << 30  # sequences times channels, which kernels number in 32 bits
_tensors = arguments.checker(OP, "a", "b", "initial_state")
options = arguments.checker(OP, "reverse", "output_final_state")


class Call(NamedTuple):
    """The tensors of a call."""

    a: Tensor
    b: Tensor
    initial_state: Optional[Tensor] = None


def check_call(call: Call) -> None:
    """Raises what scan promises of its tensors."""
    _tensors(*call)
    a, b, state = call
    check.rank(f"{OP}: a", a, 3)
    check.shape(f"{OP}: b", b, tuple(a.shape))
    if b.dtype != a.dtype:
        raise TypeError(f"{OP}: b is {b.dtype}, a is {a.dtype}; allowed is one type")
    if a.shape[0] * a.shape[2] > MOST_COLUMNS:
        raise NotImplementedError(f"{OP}: a: has {a.shape[0]} x {a.shape[2]} sequences and channels, supported are "
                                  f"up to {MOST_COLUMNS} together")
    if state is not None:
        check.shape(f"{OP}: initial_state", state, (a.shape[0], a.shape[2]))
    check.same_device(**call._asdict())
