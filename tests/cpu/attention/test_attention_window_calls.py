"""Which calls of flash_attn take the window kernel that leaves out halves of tiles. Its results have the bits that the
other kernel's have, so that no test on a GPU sees it."""
import torch

from tkq.attention import ops


def test_which_calls_take_it(monkeypatch):
    """Limits on both sides, the left one far; no more queries than keys; SHORT keys or more. Calls that differ in one
    of these alone come one after the other: they must not share a launcher."""
    taken = []
    monkeypatch.setattr(ops, "function", lambda recipe: lambda *given: taken.append(recipe.module))
    monkeypatch.setattr(ops.arch, "require_hopper", lambda device: None)
    monkeypatch.setattr(ops.arch, "num_sms", lambda device: 132)
    monkeypatch.setattr(ops.counters, "counter", lambda index: None)
    monkeypatch.setattr(ops, "_launchers", {})
    S, q = ops.SHORT, torch.empty(0, dtype=torch.bfloat16)
    for wanted, rows, keys, left, right in (
            (True, S, S, 1023, 0), (False, S + 1, S, 1023, 0), (False, S - 1, S - 1, 1023, 0),
            (False, S, S, ops.LONG_WINDOW - 1, 0), (True, S, S, ops.LONG_WINDOW, 0), (False, S, S, S - 1, 0),
        (False, S, S, 1023, -1),
            (True, S, S, 1023, 63), (False, S, S, 1023, S - 1), (True, 1, S, 1023, 0),
            (True, ops.LONG, ops.LONG, 1023, 0), (False, S, S, -1, 0)):
        options = False, None, left, right, 0.0
        ops._launch((q, *[None] * 5), (rows, 2, 128, keys, 2, 128), options, 0)
        assert taken[-1] == f"tkq.attention.forward.{'window' if wanted else 'kernel'}", (rows, keys, left, right)
