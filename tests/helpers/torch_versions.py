"""Tests that older versions of torch, which tkq also works with, cannot pass."""
import pytest
import torch


def at_least(version: str) -> bool:
    """Is the installed torch of that release or a later one? version: "2.10"."""
    wanted, found = (tuple(int(n) for n in text.split(".")[:2]) for text in (version, torch.__version__))
    return found >= wanted


def since(version: str, why: str):
    """Skips a test with older versions. why: what they lack."""
    return pytest.mark.skipif(not at_least(version), reason=f"torch {torch.__version__}, before {version}: {why}")
