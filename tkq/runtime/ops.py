"""How PyTorch sees a tkq function: as a custom op, and past the dispatcher where nothing would be lost."""
import torch
import tvm_ffi  # noqa: F401  what calls the kernels, with the op's import and not in its first call
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

_PLAIN = (Tensor, Parameter)


def torch_op(name: str, *, cuda, cpu, fake):
    """Register ``tkq::name`` and return the op to call.

    cuda, cpu: the functions behind it; the schema is read from ``cuda``'s annotations. fake: the outputs' shapes and
    dtypes for tracing. No gradient formula: until an op has one, its host function refuses gradients.
    """
    op = torch.library.custom_op(f"tkq::{name}", cuda, mutates_args=(), device_types="cuda")
    op.register_kernel("cpu")(cpu)
    op.register_fake(fake)
    return op


def direct(*tensors) -> bool:
    """May the launcher be called past the dispatcher?

    Only in plain eager mode: no compiler traces, no dispatch mode watches (FakeTensorMode, FlopCounterMode), no
    functorch transform is under way, autograd has nothing to record and carries no tangents (forward mode), and every
    tensor is a plain one. None is passed over.
    """
    if torch.compiler.is_compiling():
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    if forward_ad._current_level >= 0:
        return False
    grad = torch.is_grad_enabled()
    for x in tensors:  # noqa: SIM110  a loop, not all(...): a generator costs as much as the rest
        if x is not None and (type(x) not in _PLAIN or (grad and x.requires_grad)):
            return False
    return True
