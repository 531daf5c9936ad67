"""The order of GPU tests for several workers: the longest begin first, and none waits for what another compiles.

With `-n N --maxschedchunk 4` pytest-xdist hands out the list in order, a few tests at a time, to whichever worker is
through: a long test that stands late is begun late, and all wait for it. (`--dist worksteal` gives each worker an
equal part. One that is through asks for another's tests, one worker at a time, and waits for an answer, which comes
when that one has compiled its kernel: of 30 workers some ended 230 s before others did.)"""
import zlib

# The first compiles, in processes of its own, object files that others link afterwards (tkq/runtime/compile/build.py).
# Then those of half a minute or so each, whatever is in the cache: they compile kernels of their own, in programs of
# their own. Then what takes the kernels of these and of the first.
LONG = ("test_bundle.py::test_the_smoke_part_without_the_dsl", "test_examples_gpu.py", "test_fuzz_on_gpu.py",
        "test_naps.py", "test_dry_run.py", "test_sanitizer.py", "test_every_op.py", "test_smoke.py", "test_launches.py")
_EVERY_OP = LONG.index("test_every_op.py")


def is_long(nodeid: str) -> bool:
    return _rank(nodeid) < len(LONG)


def _rank(nodeid):
    return next((i for i, name in enumerate(LONG) if name in nodeid), len(LONG))


def ordered(names: list) -> list:
    """The same names, the long ones first; all others in their order. Of every op, there is one test of each op among
    the long ones, then those of all ops. Further ones of an op end the list, where they find the kernels: those of one
    op, begun together, would wait for the worker that compiles them."""
    first, places = {}, {}
    for name in names:
        place = _rank(name)
        if place == _EVERY_OP:
            op = _op(name)
            place = len(LONG) - 1 if op is None else place if first.setdefault(op, name) == name else len(LONG) + 1
        places[name] = place
    mixed = lambda name: zlib.crc32(name.encode()) if _rank(name) == _EVERY_OP else 0
    return sorted(names, key=lambda name: (places[name], mixed(name)))


def _op(name):
    """What a test of every op compiles: the words in brackets behind those that say how. None for one of all ops."""
    test, _, words = name.partition("[")
    of_all = not words or any(f"::{kind}" in test for kind in ("test_opcheck", "test_compile", "test_export"))
    return None if of_all else words.removeprefix("not ").removeprefix("reentrant-")
