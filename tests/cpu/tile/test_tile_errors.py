"""What the tile layer refuses while a kernel is traced: a Python error that names the operand, as it was raised."""
import ast
import pathlib

import pytest

from tests.helpers.tile.cases import recipe
from tkq import runtime

KERNELS = pathlib.Path(__file__).parents[3] / "tests" / "helpers" / "tile" / "kernels"
ERRORS = sorted(KERNELS.glob("errors*.py"))


def _names():
    """(group, case) of every entry of the tables, without importing them: collecting tests brings no DSL."""
    tables = {"REGISTERS": "kernel", "BLOCKS": "kernel", "HOST": "host", "MOVES": "move",
              "HANGS": "hang"}
    for node in (node for path in ERRORS for node in ast.parse(path.read_text()).body):
        if isinstance(node, ast.Assign) and node.targets[0].id in tables:
            yield from ((tables[node.targets[0].id], key.value) for key in node.value.keys)


CASES = list(_names())


def test_there_are_cases():
    assert len(CASES) > 150 and {group for group, _ in CASES} == {"kernel", "host", "move", "hang"}
    assert len(set(CASES)) == len(CASES)


@pytest.mark.parametrize("group,case", CASES)
def test_refused_by_name(group, case):
    from tests.helpers.tile.kernels import errors

    _, error, pattern = errors.GROUPS[group][0][case]
    with pytest.raises(error, match=pattern) as caught:
        runtime.compile_recipe(recipe("errors:build", (group, case)))
    assert type(caught.value) is error


@pytest.mark.parametrize("case", ("one_load", "two_loads", "by_address", "a_branch", "a_loop", "more_announced",
                                  "a_template", "roles", "a_cluster", "some_of_a_cluster",
                                  "consumers_of_a_block"))
def test_what_need_not_hang_compiles(case):
    from tests.helpers.tile.kernels import errors_hangs

    assert case in errors_hangs.FINE
    runtime.compile_recipe(recipe("errors_hangs:build", (case,)))


@pytest.mark.parametrize("rows,cols,dtype,swizzle,error,pattern", (
    (12, 64, "bf16", None, ValueError, "st: rows is 12"),
    (0, 64, "bf16", None, ValueError, "st: rows is 0"),
    (64, 8, "bf16", None, ValueError, "st: cols is 8, allowed for 16 bits are multiples of 16"),
    (64, 16, "e4m3", None, ValueError, "st: cols is 16, allowed for 8 bits are multiples of 32"),
    (64, 12, "fp32", None, ValueError, "st: cols is 12, allowed for 32 bits are multiples of 8"),
    (64, -16, "bf16", None, ValueError, "st: cols is -16"),
    (64, 80, "bf16", 64, ValueError, "st: swizzle is 64, .* dividing a row's 160 bytes"),
    (64, 64, "bf16", 16, ValueError, "st: swizzle is 16"),
    (64, 64, None, None, TypeError, "st: dtype is Boolean, allowed are types of 8, 16 or 32 bits"),
))
def test_shared_tile_types(rows, cols, dtype, swizzle, error, pattern):
    import cutlass

    import tkq.tile as tk

    with pytest.raises(error, match=pattern):
        tk.st(rows, cols, tk.element_type(dtype) if dtype else cutlass.Boolean, swizzle)


@pytest.mark.parametrize("cols,dtype,swizzle", (
    (64, "bf16", 128), (32, "bf16", 64), (80, "bf16", 32), (16, "fp16", 32), (128, "e4m3", 128), (96, "e5m2", 32),
    (32, "fp32", 128), (24, "fp32", 32)))
def test_shared_tile_takes_the_widest_swizzle(cols, dtype, swizzle):
    import tkq.tile as tk

    tile = tk.st(24, cols, tk.element_type(dtype))
    assert tile.swizzle == swizzle and tile.bytes == 24 * cols * tile.dtype.width // 8
    assert str(tile) == f"24 x {cols} {dtype}"


def test_element_types():
    import tkq.tile as tk

    for name in ("bf16", "fp16", "fp32", "e4m3", "e5m2", "int32"):
        assert tk.type_name(tk.element_type(name)) == name
    with pytest.raises(ValueError, match="element_type: got 'float32', allowed are bf16"):
        tk.element_type("float32")


@pytest.mark.parametrize("consumers,given,split", ((1, (), (56, 256)), (2, (), (24, 240)), (3, (), (32, 160)),
                                                   (2, (40, 232), (40, 232)), (3, (24, 152), (24, 152)),
                                                   (4, (24, 112), (24, 112))))
def test_register_split(consumers, given, split):
    import tkq.tile as tk

    assert tk.register_split(consumers, *given) == split


@pytest.mark.parametrize("consumers,given", ((2, (40, 240)), (3, (40, 160)), (1, (256, 256)), (2, (24, 236)),
                                             (2, (16, 240)), (2, (240, 24)), (2, (24, 264)), (4, ()), (0, ())))
def test_register_split_refused(consumers, given):
    """More than the launch has would hang in the hardware's allocator."""
    import tkq.tile as tk

    with pytest.raises(ValueError, match="specialise: "):
        tk.register_split(consumers, *given)


def test_every_public_operation_has_a_test_kernel():
    import tkq.tile as tk

    sources = "".join(path.read_text() for path in KERNELS.glob("*.py") if path not in ERRORS)
    used = {node.attr for node in ast.walk(ast.parse(sources)) if isinstance(node, ast.Attribute)}
    by_getattr = {"mm_AB", "mm_ABt", "mm_AtB", "mm_AtBt", "mma_AB", "mma_ABt", "mma_AtB", "mma_AtBt", "right_fill",
                  "left_fill"}
    # Types that come out of functions, constants, and what these tests call on the host.
    others = {"ColVec", "Pair", "RegTile", "RowVec", "Ring", "Pipe", "Mailbox", "Semaphore", "SharedTile", "ROWS",
              "LN2", "LOG2E", "type_name", "register_split", "roles_fit"}
    others.add("nap")  # tests/cpu/testing/test_pressure.py, tests/gpu/testing/test_naps.py
    assert set(tk.__all__) - used - by_getattr - others == set()


def test_docstrings():
    import tkq.tile as tk

    assert [n for n in tk.__all__ if callable(getattr(tk, n)) and not getattr(tk, n).__doc__] == []
