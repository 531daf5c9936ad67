"""tkq.tune without a GPU: what it chooses among, what it keeps, and who looks there."""
import json

import pytest
import torch

import tkq
from tests.cpu.test_bench_harness import FakeBatch, FakeGpu
from tkq import tuning
from tkq.gemm import call, candidates, fp8_ops, grouped_ops, plan
from tkq.gemm import tuned as chosen
from tkq.gemm.epilogue import Epilogue
from tkq.gemm.fp8_plan import Fp8Config, launch
from tkq.gemm.fp8_spec import Fp8Spec
from tkq.gemm.grouped_spec import GroupedSpec
from tkq.gemm.narrow_plan import NarrowConfig
from tkq.gemm.plan import Config
from tkq.gemm.spec import GemmSpec
from tkq.runtime import build, tuned
from tkq.testing import timing

SIZES = ((1, 8192, 8192), (64, 4096, 512), (128, 1000, 72), (129, 136, 272), (4096, 4096, 4096), (65536, 128, 28672))
GEMMS = (GemmSpec(), GemmSpec(b_major="k"), GemmSpec(out="fp32"), GemmSpec(store="elements"),
         GemmSpec(a_major="m", accumulate=True), GemmSpec(batch="ab"), GemmSpec(epilogue=Epilogue("gelu", bias="bf16")),
         GemmSpec(b_major="k", epilogue=Epilogue("swiglu")), GemmSpec(out="fp32", epilogue=Epilogue(residual=True)))
FP8S = (Fp8Spec(), Fp8Spec(scales="row"), Fp8Spec(scales="block", promote=True), Fp8Spec(scales="line", promote=True),
        Fp8Spec(out="e4m3"), Fp8Spec(store="elements"))
EFFORT = timing.Effort(rounds=7, round_seconds=0.001, warmup_seconds=0.001)


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "_cache", None)
    monkeypatch.setenv("TKQ_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def hopper(monkeypatch):
    """A machine as far as host functions see one; kernels are their recipes."""
    for module in (call, fp8_ops, grouped_ops):
        monkeypatch.setattr(module, "function", lambda recipe: recipe)
        module._launcher.cache_clear()
    monkeypatch.setattr(call.arch, "require_hopper", lambda device: None)
    monkeypatch.setattr(call.arch, "processors", lambda device: 132)
    monkeypatch.setattr(call.arch, "model", lambda device: "a GPU, 132 processors")
    yield
    for module in (call, fp8_ops, grouped_ops):
        module._launcher.cache_clear()


# ---- what is chosen among --------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("spec", GEMMS)
def test_candidates_of_gemm_fit_and_begin_with_the_plan(spec, size):
    found = candidates.of_gemm(spec, *size, 132)
    assert 2 < len(found) < 50 and len(set(found)) == len(found)
    assert plan.launch(spec, *size, 132)[0].args[1] == found[0]
    for config in found:
        config.check(spec)
        assert plan.launch(spec, *size, 132, config)[0].args[1] == config
        if isinstance(config, NarrowConfig):
            assert config.m >= size[0]


def test_nothing_is_chosen_where_there_is_one_kernel():
    assert candidates.of_gemm(GemmSpec(load="elements", store="elements"), 64, 64, 64, 132) == []


@pytest.mark.parametrize("size", [(m, n, -(-k // 16) * 16) for m, n, k in SIZES])
@pytest.mark.parametrize("spec", FP8S)
def test_candidates_of_fp8_gemm(spec, size):
    found = candidates.of_fp8_gemm(spec, *size, 132)
    assert 2 < len(found) < 50 and len(set(found)) == len(found)
    assert launch(spec, *size, 132)[0].args[1] == found[0]
    assert all(config.check(spec) is config for config in found)


@pytest.mark.parametrize("spec", (GroupedSpec(), GroupedSpec("k", b_major="n"),
                                  GroupedSpec("m", "e4m3", "e4m3", "bf16", "block")))
def test_candidates_of_grouped_gemm(spec):
    found = candidates.of_grouped_gemm(spec, 8192, 4096, 16, 132)
    assert 2 < len(found) < 50 and len(set(found)) == len(found) and not any(x.pdl for x in found)


# ---- what is kept ----------------------------------------------------------------------------------------


def problem(spec=None, sizes=(4096, 4096, 4096, 1), gpu="a GPU, 132 processors"):
    return tuned.Problem("gemm", spec or GemmSpec(), sizes, gpu)


@pytest.mark.parametrize("config", (Config(group=4), NarrowConfig(32, 128, 4), Fp8Config(lag=0)))
def test_a_configuration_comes_back(config, fresh_cache):
    spec = Fp8Spec() if isinstance(config, Fp8Config) else GemmSpec()
    path = tuned.write(problem(spec), config, {"gain": 1.25})
    note = tuned.read(problem(spec))
    assert path.parent == fresh_cache / "tuned" and note["gain"] == 1.25
    assert tuned.config(note, spec, candidates.CLASSES) == config


def test_another_problem_finds_nothing():
    tuned.write(problem(), Config(group=4), {})
    for other in (problem(GemmSpec(b_major="k")), problem(sizes=(4096, 4096, 4088, 1)), problem(gpu="another")):
        assert tuned.read(other) is None and tuned.config(None, other.spec, candidates.CLASSES) is None


@pytest.mark.parametrize("change", (lambda x: "{", lambda x: x.replace('"group"', '"no such field"'), lambda x: "[1]",
                                    lambda x: x.replace('"Config"', '"Gone"'),
                                    lambda x: x.replace('"stages": 4', '"stages": 40'),
                                    lambda x: x.replace('"stages": 4', '"stages": "four"'),
                                    lambda x: x.replace('"op": "gemm"', '"op": "other"')))
def test_what_does_not_fit_counts_as_not_there(change):
    path = tuned.write(problem(), Config(group=4), {})
    path.write_text(change(path.read_text()))
    assert tuned.config(tuned.read(problem()), GemmSpec(), candidates.CLASSES) is None


def test_the_kernel_cache_does_not_count_it(fresh_cache):
    path = tuned.write(problem(), Config(group=4), {})
    store = build.configure(most_bytes=1)
    assert store.entries() == [] and store.bytes() == 0
    store.put("a", b"x", {})
    store.put("b", b"x", {})
    assert path.exists() and [p.name for p in store.entries()] == ["b"]


# ---- who looks there -------------------------------------------------------------------------------------


def test_gemm_takes_what_was_found(hopper):
    a, b = torch.zeros(512, 256, dtype=torch.bfloat16), torch.zeros(256, 512, dtype=torch.bfloat16)
    c = torch.zeros(512, 512, dtype=torch.bfloat16)
    *_, kind = call.kind_of(a, b, c, False, False, call.PLAIN)
    spec, sizes, batches = call.spec_of(*kind[:-1])
    planned = call._launcher(kind, None)[0].args[1]
    other = next(x for x in candidates.of_gemm(spec, *sizes, 132) if x != planned)
    tuned.write(chosen.problem("gemm", spec, (*sizes, batches), a.device), other, {})
    assert call._launcher(kind, None)[0].args[1] == planned, "nothing is read at call time"
    call._launcher.cache_clear()
    assert call._launcher(kind, None)[0].args[1] == other
    assert call._launcher(kind, planned)[0].args[1] == planned, "what a test asks for comes first"


def test_the_others_take_what_was_found(hopper):
    spec, size = Fp8Spec(scales="row"), (512, 512, 256)
    tuned.write(chosen.problem("fp8_gemm", spec, size, torch.device("cpu")), Fp8Config(group=4), {})
    x, one, rows = torch.float8_e4m3fn, torch.float32, ((512, 256), (256, 512))
    kernel, *_ = fp8_ops._launcher(x, x, *rows, one, one, (512, 1), (1, 512), None, torch.bfloat16, None, -1, -1, -1)
    assert kernel.args == (spec, Fp8Config(group=4))
    a, b, ends = torch.zeros(512, 256).bfloat16(), torch.zeros(4, 256, 512).bfloat16(), torch.zeros(4).int()
    spec, *_ = grouped_ops._check(a, b, ends, None, None, None)
    config = candidates.of_grouped_gemm(spec, 512, 512, 4, 132)[-1]
    tuned.write(chosen.problem("grouped_gemm", spec, (512, 512, 256, 4), torch.device("cpu")), config, {})
    facts = [grouped_ops._facts(t) for t in (a, b, ends)]
    assert grouped_ops._launcher(*facts, False, None)[0].args == (spec, config)


# ---- tune itself -----------------------------------------------------------------------------------------


class InTurn(FakeGpu):
    """The i-th candidate takes milliseconds[i]."""

    def __init__(self, milliseconds):
        super().__init__(lambda name, turn: milliseconds[name])
        self.count = 0

    def batch(self, call, sets, calls, graphs):
        call(*sets[0])
        self.count += 1
        return FakeBatch(self, self.count - 1)


def fake_call(milliseconds, results=None):
    """(a Tunable whose kernels are additions, a GPU on which configuration i takes milliseconds[i])"""
    configs = [Config(group=i + 1) for i in range(len(milliseconds))]
    forgotten = []
    tunable = chosen.Tunable(problem(), configs, (torch.ones(8, 8), None),
                             lambda config, x, _: x + (results or {}).get(config.group, 0),
                             lambda: forgotten.append(1))
    return tunable, InTurn(milliseconds), configs


def test_the_fastest_wins_and_is_kept():
    tunable, gpu, configs = fake_call((1.0, 2.0, 0.8, 1.1))
    found = tuning._measured(tunable, EFFORT, gpu)
    assert found.chosen == str(configs[2]) and found.gain == pytest.approx(1.25) and not found.failed
    assert list(found.times) == [str(c) for c in configs]
    assert json.loads(problem().path.read_text())["gain"] == found.gain
    assert tuning._known(tunable) == found


def test_the_plan_stays_where_others_are_hardly_faster():
    tunable, gpu, configs = fake_call((1.0, 0.998, 1.0))
    found = tuning._measured(tunable, EFFORT, gpu)
    assert found.chosen == str(configs[0]) and found.gain == 1.0


def test_one_with_another_result_is_left_out():
    tunable, gpu, configs = fake_call((1.0, 0.5, 0.9), results={2: 5.0, 3: 1e-4})
    found = tuning._measured(tunable, EFFORT, gpu)
    assert found.chosen == str(configs[2]) and "off by" in found.failed[str(configs[1])]


def test_results_that_are_not_finite():
    x = torch.tensor([1.0, float("nan"), float("inf"), -2.0])
    assert tuning._off(x, x) == 0 and tuning._off(torch.zeros(4), x) > 0.5
    assert tuning._off(torch.full((4,), float("nan")), torch.ones(4)) > 0.5


def test_copies_are_laid_out_as_the_originals():
    wide = torch.randn(40, 64).bfloat16()
    for x in (wide, wide.t(), wide[:, 3:35], wide[::2, 8:40], wide[1:2].expand(9, 64), wide[:0], torch.ones(())):
        y, nothing = tuning._copies((x, None))
        assert nothing is None and torch.equal(x, y) and x.stride() == y.stride()
        if x.numel():
            assert (x.data_ptr() - y.data_ptr()) % 16 == 0 and x.data_ptr() != y.data_ptr()


def test_what_is_wrong_is_named():
    a = torch.ones(8, 8).bfloat16()
    with pytest.raises(ValueError, match="tkq.gemm, tkq.fp8_gemm, tkq.grouped_gemm"):
        tkq.tune(torch.matmul, a, a)
    with pytest.raises(ValueError, match="cpu"):
        tkq.tune(tkq.gemm, a, b=a)
