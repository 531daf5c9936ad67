"""torch.nn.functional.scaled_dot_product_attention and torch.nn.attention.varlen on tkq's attention.

    from tkq.integrations import sdpa

    handle = sdpa.enable()   # for the process, until handle.remove() or sdpa.disable()
    with sdpa.enabled():     # for a block
        F.scaled_dot_product_attention(q, k, v, is_causal=True)

tkq takes the place of torch's flash attention through torch's own registry of implementations (torch >= 2.11), where it
is named "tkq": `torch.nn.attention.activate_flash_attention_impl("tkq")` does the same as `enable`, but for the order
of backends (below). Eager mode, autograd and torch.compile go the same way.

What goes to the kernel that was there before (torch's own, or that of an implementation that was active, FA4 say),
call by call: dropout; a debug mask; slopes (alibi); keys in pages (block_table); head dims that are no multiple of 8 or
above 256; strides that TMA does not take (see `tkq.flash_attn`); no elements; GPUs other than Hopper; causal with
Sq != Sk, where torch's mask begins at the top left and tkq's ends at the bottom right. `tkq.integrations.sdpa.why_not`
says why, of tensors as aten's op has them. (`F.scaled_dot_product_attention` fills head dims up to a multiple of 8
before.)

What torch never routes to its flash backend stays as it is: a call with attn_mask, float32 or float64, heads of more
than 256 columns, v with another head dim than q, causal with Sq != Sk (it goes to another backend), the CPU; and what
`torch.nn.attention.sdpa_kernel` rules out. Where torch would choose another backend before flash (it prefers cuDNN's on
some GPUs), `enable` puts flash first among those that are allowed, and `remove` restores the order.
"""
import contextlib
import functools
import warnings

import torch

from . import sdpa_kernels
from .sdpa_kernels import Call, why_not

__all__ = ["Call", "disable", "enable", "enabled", "why_not"]

NAME = "tkq"


class Kernels:
    """tkq's kernels, put over those that are there, until ``remove``. torch's registry keeps one as its handle.

    key: the dispatch key. beneath: the handle of another implementation whose kernels are to stay below these."""

    def __init__(self, key="CUDA", beneath=None):
        self.beneath, self.library = beneath, torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="[\\s\\S]*Overriding a previously registered kernel")
            for name, ours in sdpa_kernels.OPS.items():
                if hasattr(torch.ops.aten, name):
                    of_key = functools.partial(_ours_or, ours, _kernel(name, key))
                    self.library.impl(name, of_key, key, with_keyset=True, allow_override=True)

    def remove(self):
        if self.library is not None:
            self.library._destroy()  # now, and not when the last reference goes
            self.library = None
        if self.beneath is not None:
            self.beneath.remove()
            self.beneath = None


def _kernel(name, key):
    """The kernel that is there, or None: torch without CUDA has none."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key):
        return None
    return torch.library.get_kernel(f"aten::{name}", key)


def _ours_or(ours, before, keys, *args, **options):
    found = ours(*args, **options)
    if found is not None:
        return found
    if before is None:
        raise NotImplementedError("tkq.integrations.sdpa: this call is not for tkq, and torch has no flash attention")
    return before.call_boxed(keys, *args, **options)


class Handle:
    """What `enable` returns. ``remove``: what was active before is so again; nothing if that has happened, or another
    implementation has been activated since."""

    def __init__(self, before=None, order=None):
        """before: the implementation that was active. order: what restores torch's order of backends."""
        self._before, self._order = before, order

    def remove(self) -> None:
        if self._order is None:  # removed, or one more of what was enabled
            return
        self._order.close()
        self._order = None
        _handles.remove(self)
        registry = _registry()
        if registry.current_flash_attention_impl() == NAME:
            registry.restore_flash_attention_impl()
            if self._before is not None:
                registry.activate_flash_attention_impl(self._before)


_handles: list = []  # those that are not removed: one, but where another implementation was activated between


def enable() -> Handle:
    """Let torch's scaled_dot_product_attention and varlen attention use tkq where it takes the call.

    Returns a handle with ``remove()``. Enabling what is enabled changes nothing, and that handle's ``remove`` does not
    either.

    Raises:
        RuntimeError: torch before 2.11, which has no registry of implementations.
    """
    registry = _registry()
    before = registry.current_flash_attention_impl()
    if before == NAME:
        return Handle()
    registry.register_flash_attention_impl(NAME, register_fn=functools.partial(_register, before))
    try:
        registry.activate_flash_attention_impl(NAME)
    finally:
        registry.register_flash_attention_impl(NAME, register_fn=_register)
    handle = Handle(before, _flash_first())
    _handles.append(handle)
    return handle


def disable() -> None:
    """Undo `enable`: what was active before is so again. Nothing where tkq is not enabled."""
    for handle in reversed(tuple(_handles)):
        handle.remove()


@contextlib.contextmanager
def enabled():
    """`enable` for the length of a ``with`` block, which gets its handle; removed where the block raises, too. Raises
    as `enable` does."""
    handle = enable()
    try:
        yield handle
    finally:
        handle.remove()


def _registry():
    registry = torch.nn.attention
    if not hasattr(registry, "restore_flash_attention_impl"):
        raise RuntimeError("tkq.integrations.sdpa needs torch >= 2.11, which has a registry of flash attentions; this "
                           f"is {torch.__version__}")
    return registry


def _register(before=None):
    """What torch calls to activate tkq, after it has removed what was active. before: its name; its kernels are put
    back, below ours: they take what tkq does not."""
    implementations = torch.nn.attention._registry._FLASH_ATTENTION_IMPLS
    return Kernels(beneath=None if before is None else implementations[before]())


def _flash_first() -> contextlib.ExitStack:
    """Until it is closed, flash is the first of the backends that are allowed, if it is one."""
    from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, sdpa_kernel

    stack, now = contextlib.ExitStack(), _cur_sdpa_kernel_backends(with_priority=True)
    if SDPBackend.FLASH_ATTENTION in now[1:]:
        flash = [SDPBackend.FLASH_ATTENTION]
        stack.enter_context(sdpa_kernel(flash + [b for b in now if b not in flash], set_priority=True))
    return stack


if hasattr(torch.nn.attention, "register_flash_attention_impl"):
    torch.nn.attention.register_flash_attention_impl(NAME, register_fn=_register)
