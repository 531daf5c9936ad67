"""How PyTorch sees a tkq function: as a custom op, and past the dispatcher where nothing would be lost."""
import torch
import tvm_ffi  # noqa: F401  what calls the kernels, with the op's import and not in its first call
from torch import Tensor
from torch._C import _len_torch_dispatch_stack as dispatch_modes
from torch._C._functorch import peek_interpreter_stack as transforms
from torch.autograd import Function, forward_ad
from torch.autograd.function import once_differentiable
from torch.compiler import is_compiling
from torch.nn import Parameter

_PLAIN = (Tensor, Parameter)


def torch_op(name: str, *, cuda, cpu, fake, setup=None, backward=None):
    """Register ``tkq::name`` and return the op to call.

    cuda, cpu: the functions behind it; the schema is read from ``cuda``'s annotations. fake: the outputs' shapes and
    dtypes for tracing. setup(ctx, inputs, output), backward(ctx, *grads): the gradient formula, as autograd.Function
    has it; the same two serve ``eager_function``. Without one the host function refuses gradients.
    """
    op = torch.library.custom_op(f"tkq::{name}", cuda, mutates_args=(), device_types="cuda")
    op.register_kernel("cpu")(cpu)
    op.register_fake(fake)
    if backward is not None:
        op.register_autograd(backward, setup_context=setup)
    return op


def eager_function(name: str, *, forward, setup, backward):
    """The autograd.Function of an op for plain eager mode (see ``recording``), where the dispatcher's way costs several
    times as much. Its backward is not differentiable: asking for a second derivative raises torch's error.

    forward: takes the op's inputs, runs without recording. setup, backward: as in ``torch_op``."""
    members = dict(forward=forward, setup_context=setup, backward=once_differentiable(backward))
    return type(name, (Function,), {key: staticmethod(value) for key, value in members.items()})


def _plain_eager() -> bool:
    """No compiler traces, no dispatch mode watches (FakeTensorMode, FlopCounterMode), no functorch transform is under
    way and no forward-mode level is open."""
    return not (is_compiling() or dispatch_modes() or transforms() is not None or forward_ad._current_level >= 0)


def direct(*tensors) -> bool:
    """May the launcher be called past the dispatcher?

    Only in plain eager mode, where autograd has nothing to record and every tensor is a plain one. None is passed over.
    """
    if not _plain_eager():
        return False
    grad = torch.is_grad_enabled()
    for x in tensors:  # noqa: SIM110  a loop, not all(...): a generator costs as much as the rest
        if x is not None and (type(x) not in _PLAIN or (grad and x.requires_grad)):
            return False
    return True


def recording(*tensors) -> bool:
    """Where ``direct`` said no: may the op's ``eager_function`` be applied past the dispatcher?

    In plain eager mode, with plain tensors, when the reason was that one of them requires a gradient."""
    return _plain_eager() and all(x is None or type(x) in _PLAIN for x in tensors)
