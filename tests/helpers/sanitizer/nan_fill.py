"""NaN in everything that is allocated and not filled, so that what a kernel leaves unwritten shows."""
from contextlib import contextmanager

import torch


@contextmanager
def poisoned():
    """Inside, torch.empty and its like bring NaN (torch's own switch, which goes with deterministic algorithms)."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]
