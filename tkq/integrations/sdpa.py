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
import threading
import warnings

import torch

from ..runtime.system import forks
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


class _Installed:
    """tkq in the place of what was active before, until no user is left.

    before: the implementation that was active. order: what restores torch's order of backends."""

    def __init__(self, before, order):
        self._before, self._order, self.users = before, order, []

    def user(self, block) -> "Handle":
        self.users.append(Handle(self, block))
        return self.users[-1]

    def left_by(self, user):
        if user in self.users:  # once; no user, after `disable`
            self.users.remove(user)
            if not self.users:
                self.remove()

    def remove(self):
        latest, registry = self is _installed[-1], _registry()
        self.users.clear()
        self._order.close()
        _installed.remove(self)
        if latest and registry.current_flash_attention_impl() == NAME:
            registry.restore_flash_attention_impl()
            if self._before is not None:
                registry.activate_flash_attention_impl(self._before)


class Handle:
    """What `enable` returns. ``remove``: what was active before is so again, once no block of `enabled` is under way;
    nothing if that has happened, or another implementation has been activated since."""

    def __init__(self, of=None, block=False):
        """of: the _Installed that it uses; None for one more of what was enabled. block: for a block's length."""
        self._of, self.block = of, block

    def remove(self) -> None:
        with _one_at_a_time:
            if self._of is not None:
                self._of.left_by(self)


_installed: list = []  # one, but where another implementation was activated between
_one_at_a_time = forks.Renewed(threading.RLock)  # blocks of several threads overlap: torch's registry is the process's


def enable() -> Handle:
    """Let torch's scaled_dot_product_attention and varlen attention use tkq where it takes the call.

    Returns a handle with ``remove()``. Enabling what is enabled changes nothing, and that handle's ``remove`` does not
    either. What a block of `enabled` has for its length is not enabled in this sense. CUDA is started: a process forked
    after that cannot use the GPU.

    Raises:
        RuntimeError: torch before 2.11, which has no registry of implementations.
    """
    with _one_at_a_time:
        of = _in_use()
        if of is None or not all(user.block for user in of.users):
            return Handle()
        return of.user(block=False)


def _in_use():
    """The _Installed of now, made where tkq is not active; None where torch's registry was asked for tkq by itself."""
    registry = _registry()
    before = registry.current_flash_attention_impl()
    if before == NAME:
        return _installed[-1] if _installed else None
    with _flash_first() as order:  # undone where what follows raises
        _activate(registry, before)
        _installed.append(_Installed(before, order.pop_all()))
    return _installed[-1]


def _activate(registry, before):
    """before: the name of the implementation that stays below, or None."""
    registry.register_flash_attention_impl(NAME, register_fn=functools.partial(_register, before))
    try:
        registry.activate_flash_attention_impl(NAME)
    finally:
        registry.register_flash_attention_impl(NAME, register_fn=_register)


def disable() -> None:
    """Undo `enable`, and `enabled` where a block is under way: what was active before is so again. Nothing where tkq is
    not enabled."""
    with _one_at_a_time:
        for of in reversed(tuple(_installed)):
            of.remove()


@contextlib.contextmanager
def enabled():
    """`enable` for the length of a ``with`` block, which gets its handle; removed where the block raises, too. Where
    blocks overlap, in several threads say, tkq stays until the last ends. Starts CUDA and raises as `enable` does."""
    with _one_at_a_time:
        of = _in_use()
        handle = Handle() if of is None else of.user(block=True)
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

    _pass_torchs_first_choice()
    stack, now = contextlib.ExitStack(), _cur_sdpa_kernel_backends(with_priority=True)
    if SDPBackend.FLASH_ATTENTION in now[1:]:
        flash = [SDPBackend.FLASH_ATTENTION]
        stack.enter_context(sdpa_kernel(flash + [b for b in now if b not in flash], set_priority=True))
    return stack


def _pass_torchs_first_choice() -> None:
    """At its first choice of a backend in a process torch puts cuDNN's first where it prefers that (on Hopper, with a
    new cuDNN), over whatever order is set by then. So that has to be behind us. Nothing is launched, no tensor has
    bytes. Where torch refuses, nothing is lost: its calls of attention would be refused, too."""
    with warnings.catch_warnings(), contextlib.suppress(RuntimeError):
        warnings.simplefilter("ignore")  # torch's reasons for ruling a backend out
        if torch.cuda.is_available():
            x = torch.empty(0, 1, 8, 64, dtype=torch.bfloat16, device="cuda")  # refused in a forked process, say
            torch._fused_sdp_choice(x, x, x)  # refused where every backend is ruled out


if hasattr(torch.nn.attention, "register_flash_attention_impl"):
    torch.nn.attention.register_flash_attention_impl(NAME, register_fn=_register)
