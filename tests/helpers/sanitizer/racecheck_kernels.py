"""What does compute-sanitizer's racecheck follow, of the ways in which warps wait for each other?

    compute-sanitizer --tool racecheck python -m tests.helpers.sanitizer.racecheck_kernels copies mbarrier

Runs one kernel of `tests/helpers/tile/kernels/races.py`: copies, scales or sums, and mbarrier, block or none. Where
"none" is reported and "block" is not, a report for "mbarrier", whose order is plain to see, is a limit of the tool. A
line "ok" or "BAD" for the result, which "none" need not have right.
"""
from __future__ import annotations

import sys

import torch

from tests.helpers.tile.run import run

ROWS = 24


def main() -> int:
    what, order = sys.argv[1:]
    x = (torch.arange(ROWS * 128, dtype=torch.float32).view(ROWS, 128) % 64).cuda()
    y = torch.zeros_like(x)
    run(f"races:build_{what}", (order,), (x, y))
    wanted = -x if what != "sums" else x.sum(1, keepdim=True).expand_as(x)
    fine = torch.equal(y, wanted) or order == "none"
    print("ok " if fine else "BAD", what, order, flush=True)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
