"""The helper that reads machine code: on kernels whose code is known, and its judgement on made-up ones."""
import dataclasses
import re

import pytest
import torch

from tests.helpers.process import machine_code
from tests.helpers.process.kernels_for_tests import Scale
from tkq.runtime import Recipe, cache
from tkq.runtime import compile_recipe as compile_afresh
from tkq.runtime.compile import build
from tkq.runtime.compile.expectation import SMEM_LIMIT, Expectation
from tkq.testing import elf, sass
from tkq.testing.sass import KernelReport, expect, register_budget

SCALE = Recipe("tests.helpers.process.kernels_for_tests:build_gpu_scale", (Scale(),))
SPILLS = Recipe("tests.helpers.process.kernels_for_tests:build_local_memory")
HOST = Recipe("tests.helpers.process.kernels_for_tests:build_scale", (Scale(),))

needs_nvdisasm = pytest.mark.skipif(sass.nvdisasm() is None, reason="nvdisasm is not installed")


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory):
    old = build._cache
    build.configure(tmp_path_factory.mktemp("cache"))
    yield
    build._cache = old


@needs_nvdisasm
def test_a_kernel_of_wide_accesses():
    kernel, = sass.report(SCALE)
    assert "ScaleOnGpu" in kernel.name
    assert kernel.wide("LDG") == kernel.wide("STG") == 1 and kernel.count("LDG.E.128") == 1
    assert (kernel.threads, kernel.stack, kernel.spill_loads, kernel.spill_stores) == (32, 0, 0, 0)
    assert (kernel.static_smem, kernel.dynamic_smem, kernel.smem) == (0, 0, 0)
    assert 8 <= kernel.registers <= 40 and 10 <= kernel.total <= 60
    assert kernel.tensor == kernel.waits == kernel.tma == 0
    assert expect(kernel, Expectation(instructions=("LDG.E.128", "STG.E.128"), registers=40, smem=0)) == []


@needs_nvdisasm
def test_a_kernel_with_local_memory_is_found_out():
    kernel, = sass.report(SPILLS)
    assert kernel.spill_loads and kernel.spill_stores and kernel.stack >= 256
    wrong = " and ".join(expect(kernel))
    assert "local loads" in wrong and "a stack of" in wrong
    assert expect(kernel, Expectation(local_memory=10_000)) == []


@needs_nvdisasm
def test_the_same_report_from_a_recipe_a_file_and_a_compiled_function():
    compiled = compile_afresh(SCALE)
    entry = build.entry_of(SCALE)
    assert cache().find(entry.path.name) is not None
    assert sass.report(SCALE) == sass.report(entry.path) == sass.report(str(entry.path)) == sass.report(compiled)


@needs_nvdisasm
def test_machine_code_alone_is_that_of_the_whole_kernel():
    """As tests have it that run no kernel, until something else has compiled the whole of it."""
    recipe = Recipe(SCALE.builder, (Scale(factor=7.0),))
    first = machine_code.entry_of(recipe)
    found = sass.report(first.path)
    assert machine_code.entry_of(recipe).path == first.path
    assert first.path.name.endswith(machine_code.SUFFIX) != torch.cuda.is_available()
    whole = build.entry_of(recipe)
    assert not whole.path.name.endswith(machine_code.SUFFIX) and sass.report(whole.path) == found
    assert machine_code.entry_of(recipe).path == whole.path


@needs_nvdisasm
def test_a_bare_object_file_tells_all_but_the_launch(tmp_path):
    data = build.exported(compile_afresh(SCALE), "tkq_x")
    (tmp_path / "x.o").write_bytes(data)
    (tmp_path / "x.cubin").write_bytes(elf.cubins(data)[0])
    from_object, = sass.report(tmp_path / "x.o")
    assert from_object.dynamic_smem is None
    assert sass.report(tmp_path / "x.cubin") == [from_object]
    assert dataclasses.replace(from_object, dynamic_smem=0) == sass.report(SCALE)[0]


@needs_nvdisasm
def test_several_are_read_together_as_each_by_itself():
    assert sass.reports([SPILLS, SCALE, SPILLS]) == [sass.report(SPILLS), sass.report(SCALE), sass.report(SPILLS)]
    with pytest.raises(ValueError, match="no machine code"):
        sass.reports([SCALE, HOST])


@needs_nvdisasm
def test_opcodes_stand_in_the_code_s_order():
    """As the whole file shows them, not their bytes alone."""
    kernel, = sass.report(SPILLS)
    code, = sass.by_address(SPILLS).values()
    assert len(code) > 100 and list(kernel.order) == [
        re.sub(r"^(@\S+)?\s*", "", text).split()[0] for _, text in sorted(code.items()) if "@!PT" not in text]


def test_what_is_no_kernel(tmp_path):
    with pytest.raises(ValueError, match="no machine code"):
        sass.report(HOST)
    (tmp_path / "x.o").write_bytes(b"\x7fELF")
    with pytest.raises(ValueError, match="no machine code"):
        sass.report(tmp_path / "x.o")
    with pytest.raises(TypeError, match="int"):
        sass.report(7)


GOOD = KernelReport("k", registers=168, stack=0, static_smem=1024, dynamic_smem=200_000, threads=384,
                    setmaxreg=(("DEALLOC", 24), ("TRY_ALLOC", 240)),
                    opcodes={"HGMMA.64x128x16.F32.BF16": 30, "WARPGROUP.ARRIVE": 8, "WARPGROUP.DEPBAR.LE": 4,
                             "UTMALDG.4D": 2, "UTMASTG.4D.MULTICAST": 1, "LDG.E.EF.128": 3, "LDG.E": 2, "LDGSTS.E": 1,
                             "NOP": 12})
THREE_ROLES = dict(threads=512, registers=128, setmaxreg=(("DEALLOC", 24), ("DEALLOC", 72), ("TRY_ALLOC", 208)))
WANTED = Expectation(tensor=16, instructions=("UTMALDG", "UTMASTG"), registers=168)


def test_counts():
    assert (GOOD.tensor, GOOD.waits, GOOD.arrives, GOOD.tma) == (30, 4, 8, 3)
    assert GOOD.wide("LDG") == 3 and GOOD.count("LDG") == 5 and GOOD.count("LDG.E.128") == 0
    assert GOOD.count("LD") == 0  # a prefix ends where a modifier begins
    assert GOOD.total == 51 and GOOD.smem == 201_024


@pytest.mark.parametrize("change, wanted, text", (
    (dict(), dict(), None),
    (dict(opcodes={**GOOD.opcodes, "STL.64": 1}), dict(), "0 local loads and 1 local stores"),
    (dict(opcodes={**GOOD.opcodes, "LDL": 3}), dict(), "3 local loads"),
    (dict(stack=16), dict(), "stack of 16"),
    (dict(), dict(tensor=31), "30 tensor-core instructions, at least 31"),
    (dict(opcodes={**GOOD.opcodes, "WARPGROUP.DEPBAR.LE": 30}), dict(), "serialised: 30 waits for 30"),
    (dict(opcodes={**GOOD.opcodes, "WARPGROUP.DEPBAR.LE": 16}), dict(), "waits_per_mma is 0.5"),
    (dict(opcodes={**GOOD.opcodes, "WARPGROUP.DEPBAR.LE": 15}), dict(), None),
    (dict(opcodes={**GOOD.opcodes, "WARPGROUP.DEPBAR.LE": 30}), dict(waits_per_mma=1.0), None),
    (dict(), dict(instructions=("UTMAREDG",)), "no UTMAREDG"),
    (dict(), dict(absent=("LDG",)), "5 LDG, none expected"),
    (dict(), dict(registers=160), "168 registers, at most 160"),
    (dict(), dict(smem=200_000), "201024 bytes of shared memory, at most 200000"),
    (dict(dynamic_smem=SMEM_LIMIT), dict(), "bytes of shared memory"),
    (dict(dynamic_smem=SMEM_LIMIT - 1024), dict(), None),
    (dict(registers=160), dict(), "setmaxnreg hangs"),
    (dict(threads=512), dict(), "a multiprocessor has 65536"),
    (dict(threads=None), dict(), "block of unknown size"),
    (dict(setmaxreg=(("TRY_ALLOC", 176),)), dict(), "setmaxnreg hangs"),  # no warpgroup gives any
    (dict(setmaxreg=(("DEALLOC", 24),)), dict(), None),
    (THREE_ROLES, dict(roles=((24, 1), (72, 1), (208, 2))), None),
    (THREE_ROLES, dict(roles=((24, 1), (72, 1), (208, 3))), "setmaxnreg hangs"),
    (THREE_ROLES, dict(roles=((24, 1), (80, 1), (208, 2))), "asks for [24, 72, 208], expected [24, 80, 208]"),
))
def test_judgement(change, wanted, text):
    wrong = expect(dataclasses.replace(GOOD, **change), dataclasses.replace(WANTED, **wanted))
    if text is None:
        assert wrong == []
    else:
        assert any(text in w for w in wrong), wrong


@pytest.mark.parametrize("few, many, consumers, registers, threads, fits", (
    (24, 240, 2, 168, 384, True),
    (32, 240, 2, 168, 384, False),
    (32, 160, 3, 128, 512, True),
    (40, 160, 3, 128, 512, False),
    (40, 232, 2, 168, 384, True),
))
def test_register_budget(few, many, consumers, registers, threads, fits):
    assert (register_budget(few, many, consumers, registers, threads) is None) is fits


def test_several_kernels_are_named():
    bad = dataclasses.replace(GOOD, name="other", stack=8)
    assert sass.expect_all([GOOD, bad], WANTED) == ["other: a stack of 8 bytes"]
    assert sass.expect_all([bad], WANTED) == ["a stack of 8 bytes"]
    lenient = dataclasses.replace(WANTED, others=(("oth", Expectation(local_memory=1)),))
    assert sass.expect_all([GOOD, bad], lenient) == []


def test_text():
    shown = sass.text("flash", [GOOD, dataclasses.replace(GOOD, dynamic_smem=None)])
    assert "flash: 168 registers, 201024 bytes" in shown and "flash: 168 registers, ? bytes" in shown
    assert "tensor 30" in shown and "TMA 3" in shown and "LDG.128 3" in shown and "USETMAXREG 2" in shown
