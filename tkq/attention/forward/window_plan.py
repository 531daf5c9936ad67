"""Which windows have a kernel of their own (``window.WindowForward``), and how it is built."""
from typing import Optional

from tkq.attention.forward.config import AttentionConfig, WindowConfig
from tkq.attention.forward.spec import AttentionSpec

_D128 = WindowConfig()


def window_plan(spec: AttentionSpec, length: str) -> Optional[WindowConfig]:
    """The configuration for a problem of no more queries than keys, short, medium or long (``plan.length_class``).
    None: it takes ``plan``'s. What was measured is in docs/attempts.md."""
    dims, one_length = (spec.head_dim, spec.head_dim_v), not spec.varlen and spec.pack == 1
    both_sides = spec.long_window and (spec.causal or spec.right)
    return _D128 if both_sides and one_length and dims == (128, 128) and length != "short" else None


def builder_of(config: AttentionConfig) -> str:
    """The class of the kernel that a configuration is for, as ``Recipe`` names it."""
    name = "window:WindowForward" if isinstance(config, WindowConfig) else "kernel:AttentionForward"
    return f"tkq.attention.forward.{name}"
