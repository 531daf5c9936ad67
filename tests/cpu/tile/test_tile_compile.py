"""The tile layer's test kernels compile for sm_90a, and their machine code has what it should: no GPU needed."""
import collections

import pytest

from tests.helpers.tile import cases
from tkq.runtime.compile.expectation import Expectation
from tkq.testing import sass


def pytest_generate_tests(metafunc):
    """Every tenth kernel of a family, at least one; all with --all-kernels, and in the GPU suite, by their results."""
    if "opcodes" not in metafunc.fixturenames:
        return
    seen, every = collections.Counter(), 1 if metafunc.config.getoption("--all-kernels") else 10
    chosen = []
    for case in cases.CASES:
        if seen[case[0]] % every == 0:
            chosen.append(pytest.param(*case, id=cases.name(*case[:2])))
        seen[case[0]] += 1
    metafunc.parametrize("builder,args,opcodes", chosen)


@pytest.mark.machine_code(recipe=cases.recipe)
def test_compiles(builder, args, opcodes, machine_code):
    # A product of one step has one wait: serialised or not is to be seen where there are several.
    wanted = Expectation(instructions=opcodes, waits_per_mma=1.0 if builder == "mma:build" else 0.5)
    assert len(machine_code) == 1 and sass.expect(machine_code[0], wanted) == []


def test_multicast_is_in_the_instruction():
    kernel, = sass.report(cases.recipe("memory:build_multicast", ("bf16", 64, 64, 2, 2)))
    assert any(op.startswith("UTMALDG") and "MULTICAST" in op for op in kernel.opcodes)


def test_names_are_unique():
    names = [cases.name(builder, args) for builder, args, _ in cases.CASES]
    assert len(set(names)) == len(names)
