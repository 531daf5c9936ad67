"""The order of GPU tests for several workers: the longest begin first, behind what compiles for others.

With `-n N --maxschedchunk 4` pytest-xdist hands out the list in order, a few tests at a time, to whichever worker is
through: a long test that stands late is begun late, and all wait for it. (`--dist worksteal` gives each worker an
equal part. One that is through asks for another's tests, one worker at a time, and waits for an answer, which comes
when that one has compiled its kernel: of 30 workers some ended 230 s before others did.)"""
import zlib

# The first two compile what others take from the cache: launches are counted of the one's calls, a bundle is made of
# the other's. Then those of a minute or so each, whatever is in the cache: they compile kernels of their own, in
# programs of their own. The last, of ten seconds each, a hundred of which would otherwise be what the run ends with.
LONG = ("test_every_op.py", "test_smoke.py", "test_fuzz_on_gpu.py",
        "test_bundle.py::test_the_smoke_part_without_the_dsl", "test_examples_gpu.py", "test_dry_run.py",
        "test_sanitizer.py", "test_launches.py", "test_naps.py")


def is_long(nodeid: str) -> bool:
    return _rank(nodeid) < len(LONG)


def _rank(nodeid):
    return next((i for i, name in enumerate(LONG) if name in nodeid), len(LONG))


def ordered(names: list) -> list:
    """The same names, the long ones first; all others in their order. Of every op, neighbours are calls of different
    ops: those of one, begun together, would wait for one worker that compiles its kernels."""
    return sorted(names, key=lambda name: (_rank(name), zlib.crc32(name.encode()) if _rank(name) == 0 else 0))
