"""The order in which several workers take GPU tests."""
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.process.long_first import LONG, is_long, ordered

WORDS = st.lists(st.sampled_from((*LONG, "test_a.py", "test_b.py")), max_size=60)
OF_EVERY_OP = "tests/gpu/runtime/test_every_op.py"


@given(WORDS)
def test_each_once_and_the_others_in_their_order(kinds):
    names = [f"{kind}::{i}" for i, kind in enumerate(kinds)]
    found = ordered(names)
    assert sorted(found) == sorted(names)
    assert [n for n in found if not is_long(n)] == [n for n in names if not is_long(n)]


@given(WORDS)
def test_the_long_ones_begin_first(kinds):
    found = ordered([f"{kind}::test[{i}]" for i, kind in enumerate(kinds)])
    places = [next((i for i, kind in enumerate(LONG) if kind in name), len(LONG)) for name in found]
    assert places == sorted(places)


def test_no_two_tests_of_an_op_begin_together():
    """One of each op, then those of all ops; behind all others what finds its kernels."""
    names = [f"{OF_EVERY_OP}::test_{kind}[{op}]" for kind in ("autocast", "grad_scaler") for op in ("gemm", "scan, x")]
    names += [f"{OF_EVERY_OP}::test_checkpoint[{how}reentrant-gemm]" for how in ("", "not ")]
    names += [f"{OF_EVERY_OP}::test_{test}" for test in ("export[the others]", "on_a_device")]
    names += ["test_smoke.py::a", "b::c"]
    found = ordered(names)
    assert set(found[:2]) == set(names[:2]) and found[2] == "test_smoke.py::a"
    assert set(found[3:5]) == set(names[6:8]) and found[5] == "b::c" and set(found[6:]) == set(names[2:6])
