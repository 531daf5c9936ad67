"""Index tensors with values that no caller means, and what they are to mean: for the tests on the GPU, on the CPU and
under a sanitizer."""
import torch

MOST, LEAST = (1 << 31) - 1, -(1 << 31)
BAD_LABELS = (-1, -100, LEAST, MOST)  # and the number of classes, and more
BAD_INT64_LABELS = (1 << 31, 1 << 32, (1 << 32) + 3, 1 << 40, (1 << 63) - 1, -(1 << 63), -(1 << 32) + 2)
# of 300 rows: falling, negative, beyond the end, the ends of int32, zeros behind; all begin with 0 or less
CUTS = ((0, 200, 100, 250, 300), (0, 100, -5, 250, 300), (-7, 100, 5000, 250, 300), (0, MOST, LEAST, 17, 300),
        (LEAST, LEAST, LEAST, LEAST, LEAST), (0, MOST, MOST, MOST, MOST), (0, 120, 280, 0, 0), (0, 300, 200, 100, 0))
BAD_POSITIONS = (-1, 64, 65, MOST, LEAST)  # of a table of 64 rows
BAD_INT64_POSITIONS = (1 << 32, (1 << 32) + 5, (1 << 63) - 1, -(1 << 63))


def labels(V: int, dtype: torch.dtype, rows: int) -> tuple:
    """(labels (rows,) of which every other one is bad, which are bad)."""
    bad = [V, V + 1, *BAD_LABELS, *(BAD_INT64_LABELS if dtype == torch.int64 else ())]
    target = torch.arange(rows) * 3 % V
    target[::2] = torch.tensor([bad[i % len(bad)] for i in range(len(target[::2]))])
    return target.to(dtype), torch.arange(rows) % 2 == 0


def positions(rows: int, dtype: torch.dtype) -> torch.Tensor:
    """(rows,), every other one bad, of a table of 64 rows."""
    bad = [*BAD_POSITIONS, *(BAD_INT64_POSITIONS if dtype == torch.int64 else ())]
    found = torch.arange(rows) * 5 % 64
    found[::2] = torch.tensor([bad[i % len(bad)] for i in range(len(found[::2]))])
    return found.to(dtype)


def risen(cuts, total: int = 300) -> torch.Tensor:
    """What cu_seqlens, or offsets of groups, mean."""
    return torch.tensor(cuts, dtype=torch.int32).clamp(0, total).cummax(0).values
