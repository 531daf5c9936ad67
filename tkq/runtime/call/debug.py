"""A switch for checks of what tensors hold. They wait for the GPU, so they are off where nothing was said.

    with tkq.runtime.call.debug.checks():
        loss = tkq.cross_entropy(logits, target)    # IndexError where a target is out of range

What each op checks then is in its documentation. It holds for the thread, or asynchronous task, that entered it.
"""
from contextlib import contextmanager
from contextvars import ContextVar

_on: ContextVar = ContextVar("tkq_debug_checks", default=False)

enabled = _on.get


@contextmanager
def checks(on: bool = True):
    """Check inside the block; or, with False, do not."""
    token = _on.set(on)
    try:
        yield
    finally:
        _on.reset(token)
