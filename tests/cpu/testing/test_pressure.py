"""tkq.testing.pressure: what it refuses, that it is part of a kernel's name, and what it does to machine code."""
import pytest

from tests.helpers.process.kernels_for_tests import Scale
from tests.helpers.tile.cases import recipe as of_tile_layer
from tkq.gemm.dense.small_m_config import SmallMConfig
from tkq.gemm.dense.small_m_plan import fit_to_spec, recipe
from tkq.gemm.dense.spec import GemmSpec
from tkq.runtime import Recipe
from tkq.runtime.compile import build, keys, launches
from tkq.runtime.compile import pressure as setting
from tkq.testing import elf, pressure, sass

FEW_ROWS = recipe(GemmSpec(b_major="k"), fit_to_spec(SmallMConfig(16, 64, 2), GemmSpec(b_major="k")))


@pytest.fixture(autouse=True)
def before_the_first_kernel(monkeypatch):
    monkeypatch.setattr(build, "_functions", {})
    yield
    setting.ask(None)


@pytest.mark.parametrize("error, words, given", (
    (TypeError, "poison: got int", dict(poison=1)), (TypeError, "late_stores: got int", dict(late_stores=2)),
    (TypeError, "late_additions: got int", dict(late_additions=1)),
    (TypeError, "one_group: got str", dict(one_group="keys")),
    (ValueError, "one_group: got True without naps", dict(one_group=True)),
    (TypeError, "naps: got list", dict(naps=["consumer"])),
    (ValueError, "naps: got the place 'customer', allowed are start, producer", dict(naps={"customer": 100})),
    (ValueError, "naps: consumer is 0, allowed", dict(naps={"consumer": 0})),
    (ValueError, "naps: consumer is 1.5, allowed", dict(naps={"consumer": 1.5})),
    (ValueError, "naps: consumer is True, allowed", dict(naps={"consumer": True}))))
def test_what_is_refused(error, words, given):
    with pytest.raises(error, match=words):
        pressure(**given)
    assert setting.current() is None


def test_it_comes_before_the_first_kernel():
    build._functions["any"] = "kernel"
    with pytest.raises(RuntimeError, match="has kernels already"):
        pressure(poison=True)


def test_it_is_part_of_a_kernel_s_name_while_it_holds():
    one = Recipe("tests.helpers.process.kernels_for_tests:build_gpu_scale", (Scale(),))
    names = [keys.entry_name(one)]
    for given in (dict(poison=True), dict(naps={"wait": 100}), dict(naps={"wait": 200}), dict(late_stores=True),
                  dict(late_additions=True), dict(naps={"wait": 200}, one_group=True)):
        pressure(**given)
        names.append(keys.entry_name(one))
    pressure()
    assert len(set(names)) == len(names) and keys.entry_name(one) == names[0]


@pytest.mark.skipif(sass.nvdisasm() is None, reason="nvdisasm is not installed")
def test_machine_code_has_it_where_it_was_asked_for_and_only_there(tmp_path):
    wanted = {"plain": {}, "wait": dict(naps={"consumer": 500}), "late": dict(naps={"start": 500}),
              "alone": dict(naps={"start": 500}, one_group=True), "load": dict(naps={"load": 500}),
              "spoilt": dict(poison=True), "again": {}}
    code = {}
    for name, given in wanted.items():
        pressure(**given)
        code[name], = elf.cubins(launches.machine_code(build.compile_recipe(FEW_ROWS, runs=False)))
        (tmp_path / name).write_bytes(code[name])
    report = dict(zip(wanted, (one for one, in sass.reports([tmp_path / name for name in wanted]))))
    slept = {name: one.count("NANOSLEEP") - report["plain"].count("NANOSLEEP")  # waits on semaphores do
             for name, one in report.items()}
    # behind a wait and behind a release; at the start, of one group as of all; behind both loads
    assert slept == {"plain": 0, "wait": 2, "late": 1, "alone": 1, "load": 2, "spoilt": slept["spoilt"], "again": 0}
    assert code["again"] == code["plain"] != code["wait"] and code["alone"] != code["late"]
    assert report["spoilt"].wide("STS") > report["plain"].wide("STS")
    assert report["spoilt"].count("BPT") > report["plain"].count("BPT")  # a trap


@pytest.mark.skipif(sass.nvdisasm() is None, reason="nvdisasm is not installed")
def test_naps_before_a_copy_s_arrival_and_behind_barriers():
    def compiled(builder, options, **naps):
        pressure(naps)
        return build.compile_recipe(of_tile_layer(builder, options), runs=False)

    copy, barriers = ("memory:build_copy_async", (3,)), ("sync:build_named_barrier", ())
    slept = [kernel.count("NANOSLEEP") for kernel, in sass.reports([
        compiled(*copy), compiled(*copy, load=500), compiled(*barriers), compiled(*barriers, barrier=500)])]
    assert slept[1] == slept[0] + 1
    assert slept[3] == slept[2] + 3  # two at the named one, one at the block's
