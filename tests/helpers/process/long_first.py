"""The order of GPU tests for several workers: the longest begin first, each on a worker of its own.

pytest-xdist gives each worker an equal part of the list, in order, and lets those that are through take from the ends
of others' parts: a long test that stands late in a part is begun late, and all wait for it."""
# The first of a minute or so each, whatever is in the kernel cache: they compile kernels of their own, in programs of
# their own. The last, of ten seconds each, a hundred of which would otherwise be what the run ends with.
LONG = ("test_fuzz_on_gpu.py", "test_bundle.py::test_the_smoke_part_without_the_dsl", "test_examples_gpu.py",
        "test_dry_run.py", "test_sanitizer.py", "test_launches.py", "test_naps.py")


def is_long(nodeid: str) -> bool:
    return _rank(nodeid) < len(LONG)


def _rank(nodeid):
    return next((i for i, name in enumerate(LONG) if name in nodeid), len(LONG))


def ordered(names: list, workers: int) -> list:
    """The same names, the long ones dealt out to the beginnings of as many parts as there are workers."""
    long, others = sorted(filter(is_long, names), key=_rank), [n for n in names if not is_long(n)]
    found, taken = [], 0
    for i in range(workers):
        mine = long[i::workers]
        end = max(taken, len(names) * (i + 1) // workers - len(found) - len(mine) + taken)
        found += mine + others[taken:end]
        taken = min(end, len(others))
    return found
