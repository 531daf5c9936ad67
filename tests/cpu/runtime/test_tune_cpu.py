"""tkq.tune without a GPU: what it chooses among, what it stores, and which calls look there."""
import contextlib
import dataclasses
import json
import os

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tkq
from tests.cpu.bench.test_bench_harness import FakeBatch, FakeGpu
from tkq import runtime
from tkq.gemm import candidates
from tkq.gemm import tuned as chosen
from tkq.gemm.dense import launch as call
from tkq.gemm.dense.config import Config
from tkq.gemm.dense.small_m_config import SmallMConfig
from tkq.gemm.dense.spec import GemmSpec
from tkq.gemm.fp8 import ops
from tkq.gemm.fp8.config import Fp8Config
from tkq.gemm.fp8.spec import Fp8Spec
from tkq.gemm.grouped import ops as grouped_ops
from tkq.gemm.grouped.spec import GroupedSpec
from tkq.runtime.compile import build, tuned
from tkq.runtime.device import arch
from tkq.testing import timing
from tkq.warmup import tune

CONFIGS = {x.op: x for x in (call.CONFIGS, ops.CONFIGS, grouped_ops.CONFIGS)}
CLASSES = {**CONFIGS["gemm"].classes, **CONFIGS["fp8_gemm"].classes}
EFFORT = timing.Effort(rounds=7, round_seconds=0.001, warmup_seconds=0.001)


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "_cache", None)
    monkeypatch.setenv("TKQ_CACHE_DIR", str(tmp_path / "cache"))
    tuned.clear()
    tuned.ignore_tuned(False)
    yield tmp_path / "cache"
    tuned.ignore_tuned(False)
    tuned._unwritten.clear()


@pytest.fixture
def hopper(monkeypatch):
    """A machine as far as host functions see one; kernels are their recipes."""
    for module in (call, ops, grouped_ops):
        monkeypatch.setattr(module, "function", lambda recipe: recipe)
        _forget(module)
    monkeypatch.setattr(call.arch, "require_hopper", lambda device: None)
    monkeypatch.setattr(call.arch, "num_sms", lambda device: 132)
    monkeypatch.setattr(call.arch, "model", lambda device: "a GPU, 132 processors")
    yield
    for module in (call, ops, grouped_ops):
        _forget(module)


def _forget(module):
    (call.clear if module is call else module._launcher.cache_clear)()


# ---- what is stored --------------------------------------------------------------------------------------


def problem(spec=None, sizes=(4096, 4096, 4096, 1), gpu="a GPU, 132 processors"):
    return tuned.Problem("gemm", spec or GemmSpec(), sizes, gpu)


@pytest.mark.parametrize("config", (Config(raster_group=4), SmallMConfig(32, 128, 4), Fp8Config(wgmma_in_flight=0)))
def test_a_configuration_comes_back(config, fresh_cache):
    spec = Fp8Spec() if isinstance(config, Fp8Config) else GemmSpec()
    path = tuned.write(problem(spec), config, {"gain": 1.25})
    note = tuned.read(problem(spec))
    assert path.parent == fresh_cache / "tuned" and note["gain"] == 1.25
    assert tuned.config(note, spec, CLASSES) == config


def test_another_problem_finds_nothing():
    tuned.write(problem(), Config(raster_group=4), {})
    for other in (problem(GemmSpec(b_major="k")), problem(sizes=(4096, 4096, 4088, 1)), problem(gpu="another")):
        assert tuned.read(other) is None and tuned.config(None, other.spec, CLASSES) is None


@pytest.mark.parametrize("change",
                         (lambda x: "{", lambda x: x.replace('"raster_group"', '"no such field"'), lambda x: "[1]",
                          lambda x: x.replace('"Config"', '"Gone"'),
                          lambda x: x.replace('"stages": 4', '"stages": 40'),
                          lambda x: x.replace('"stages": 4', '"stages": "four"'),
                          lambda x: x.replace('"stages": 4', '"stages": 4.0'),
                          lambda x: x.replace('"hold_in_registers": true', '"hold_in_registers": 1'),
                          lambda x: x.replace('"pdl": false', '"pdl": null'),
                          lambda x: x.replace('"cluster": 2,', ''), lambda x: x[:x.index('"class"')] + "}",
                          lambda x: x.replace('"Config"', '"Fp8Config"'), lambda x: "null",
                          lambda x: x.replace('"Config"', "[]"),
                          lambda x: x.replace('"op": "gemm"', '"op": "other"')))
def test_what_does_not_fit_counts_as_not_there(change):
    path = tuned.write(problem(), Config(raster_group=4), {})
    path.write_text(change(path.read_text()))
    assert chosen.stored(problem(), tuned.read(problem()), call.CONFIGS) is None


def fields(config, **changed):
    return {"class": type(config).__name__, "config": {**dataclasses.asdict(config), **changed}}


@pytest.mark.parametrize("op, spec, found", (
    ("gemm", GemmSpec(), fields(SmallMConfig(), split=0)), ("gemm", GemmSpec(), fields(SmallMConfig(), parts=0)),
    ("gemm", GemmSpec(), fields(SmallMConfig(), m=0)), ("gemm", GemmSpec(), fields(SmallMConfig(m=16))),
    ("gemm", GemmSpec(), fields(Config(), n=0)), ("gemm", GemmSpec(), fields(Fp8Config())),
    ("gemm", GemmSpec(out="fp32"), fields(Config())), ("fp8_gemm", Fp8Spec(), fields(Config())),
    ("fp8_gemm", Fp8Spec(), fields(Fp8Config(wgmma_in_flight=0), consumers=0)),
    ("fp8_gemm", Fp8Spec(), fields(Fp8Config(wgmma_in_flight=0), split=0)),
    ("fp8_gemm", Fp8Spec(), fields(Fp8Config(wgmma_in_flight=0), stages=4.0)),
    ("grouped_gemm", GroupedSpec(), fields(SmallMConfig())),
    ("grouped_gemm", GroupedSpec("k", "e4m3", "e4m3", "fp32", "row", "row"), fields(Fp8Config(n=128, pdl=True))),
    ("grouped_gemm", GroupedSpec(out="fp32"), fields(Fp8Config(n=128, wgmma_in_flight=0, overlap_epilogue=1))),
    ("grouped_gemm", GroupedSpec(), fields(Fp8Config(n=128, stages=7)))))
def test_a_configuration_of_no_sense_counts_as_not_there(op, spec, found):
    assert chosen.stored(tuned.Problem(op, spec, (64, 512, 512, 4), "a GPU"), found, CONFIGS[op]) is None


def test_what_a_fleet_shares_is_read_first(fresh_cache, tmp_path, monkeypatch):
    tuned.write(problem(), Config(raster_group=4), {"of": "fleet"})
    monkeypatch.setattr(build, "_cache", None)
    monkeypatch.setenv("TKQ_CACHE_DIR", f"{fresh_cache}:{tmp_path / 'own'}")
    tuned.clear()
    assert tuned.anything() and tuned.read(problem())["of"] == "fleet"
    assert tuned.write(problem(), Config(raster_group=2), {"of": "own"}).parent == tmp_path / "own" / "tuned"
    assert tuned.read(problem())["of"] == "fleet"
    for path in (fresh_cache / "tuned").iterdir():
        path.write_text("damaged")
    assert tuned.read(problem())["of"] == "own"


def test_other_sources_find_nothing(monkeypatch):
    tuned.write(problem(), Config(raster_group=4), {})
    assert tuned.read(problem())
    monkeypatch.setattr(tuned, "_digest", lambda: "other")
    assert tuned.read(problem()) is None


@pytest.mark.parametrize("wrong", ("a file", "no move"))
def test_what_cannot_be_written_counts_for_this_process(wrong, fresh_cache, monkeypatch):
    if wrong == "a file":
        fresh_cache.write_text("in the folder's place")
    else:
        monkeypatch.setattr(tuned.os, "replace", lambda *_, **__: (_ for _ in ()).throw(OSError("full")))
    with pytest.warns(UserWarning, match="for this process alone"):
        tuned.write(problem(), Config(raster_group=4), {})
    assert tuned.anything() and chosen.stored(problem(), tuned.read(problem()), call.CONFIGS) == Config(raster_group=4)
    assert wrong == "a file" or list((fresh_cache / "tuned").iterdir()) == [], "a temporary file stayed"


def test_what_others_may_change_counts_as_not_there(fresh_cache):
    path = tuned.write(problem(), Config(raster_group=4), {})
    path.chmod(0o666)
    assert tuned.read(problem()) is None
    path.unlink()
    os.mkfifo(path)
    assert tuned.read(problem()) is None  # and waits for nothing


def test_the_kernel_cache_does_not_count_it(fresh_cache):
    path = tuned.write(problem(), Config(raster_group=4), {})
    store = build.configure(most_bytes=1)
    assert store.entries() == [] and store.bytes() == 0
    store.put("a.so", b"x", {})
    store.put("b.so", b"x", {})
    assert path.exists() and [p.name for p in store.entries()] == ["b.so"]


# ---- which calls look there -------------------------------------------------------------------------------


def test_gemm_takes_what_was_found(hopper):
    a, b = torch.zeros(512, 256, dtype=torch.bfloat16), torch.zeros(256, 512, dtype=torch.bfloat16)
    c = torch.zeros(512, 512, dtype=torch.bfloat16)
    *_, kind = call.kind_of(a, b, c, False, False, call.PLAIN)
    spec, sizes, batches = call.spec_of(*kind[:-1])
    planned = call._launcher(kind, None)[0].args[1]
    other = next(x for x in candidates.of_gemm(spec, *sizes, 132) if x != planned)
    tuned.write(chosen.problem("gemm", spec, (*sizes, batches), a.device), other, {})
    assert call._launcher(kind, None)[0].args[1] == planned, "nothing is read at call time"
    call.clear()
    assert call._launcher(kind, None)[0].args[1] == other
    assert call._launcher(kind, planned)[0].args[1] == planned, "what a test asks for comes first"


def test_the_others_take_what_was_found(hopper):
    spec, size = Fp8Spec(scale_a="row", scale_b="row"), (512, 512, 256)
    tuned.write(chosen.problem("fp8_gemm", spec, size, torch.device("cpu")), Fp8Config(raster_group=4), {})
    x, one, rows = torch.float8_e4m3fn, torch.float32, ((512, 256), (256, 512))
    kernel, *_ = ops._launcher(x, x, *rows, one, one, (512, 1), (1, 512), None, torch.bfloat16, None, -1, -1, -1)
    assert kernel.args == (spec, Fp8Config(raster_group=4))
    a, b, ends = torch.zeros(512, 256).bfloat16(), torch.zeros(4, 256, 512).bfloat16(), torch.zeros(4).int()
    spec, *_ = grouped_ops._check(a, b, ends, None, None, None)
    config = candidates.of_grouped_gemm(spec, 512, 512, 4, 132)[-1]
    tuned.write(chosen.problem("grouped_gemm", spec, (512, 512, 256, 4), torch.device("cpu")), config, {})
    facts = [grouped_ops._facts(t) for t in (a, b, ends)]
    assert grouped_ops._launcher(*facts, False, None)[0].args == (spec, config)


def gemm_kind():
    """(what gemm's launcher takes, the problem, the planned configuration, another)"""
    a, b = torch.zeros(512, 256, dtype=torch.bfloat16), torch.zeros(256, 512, dtype=torch.bfloat16)
    *_, kind = call.kind_of(a, b, torch.zeros(512, 512, dtype=torch.bfloat16), False, False, call.PLAIN)
    tunable = call.tunable(a, b)
    return kind, tunable.problem, *candidates.of(tunable.problem, 132)[:2], (a, b)


def test_what_another_process_found_counts_once_tune_is_asked(hopper, monkeypatch):
    kind, asked, planned, other, args = gemm_kind()
    assert call._launcher(kind, None)[0].args[1] == planned
    with monkeypatch.context() as alone:  # another process: this one does not know
        alone.setattr(tuned, "clear", lambda: None)
        tuned.write(asked, other, dict(gain=1.1, times={}, failed={}))
    call.clear()
    assert call._launcher(kind, None)[0].args[1] == planned, "the folder is looked for once"
    monkeypatch.setattr(tune, "_on", lambda *_: contextlib.nullcontext())
    assert tkq.tune(tkq.gemm, *args).chosen == str(other)
    assert call._launcher(kind, None)[0].args[1] == other


def test_nothing_is_read_where_nothing_was_tuned(hopper, monkeypatch):
    kind, _, planned, *_ = gemm_kind()
    monkeypatch.setattr(tuned, "read", lambda _: pytest.fail("read"))
    assert call._launcher(kind, None)[0].args[1] == planned


def test_work_is_done_on_the_tensors_device(monkeypatch):
    current, seen = [], []

    @contextlib.contextmanager
    def device(which):
        current.append(which)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    tunable, gpu, configs = fake_call((1.0, 0.5))
    tunable = tunable._replace(call=lambda config, out, x, _: seen.extend(current) or out.copy_(x))
    monkeypatch.setattr(call, "tunable", lambda *_: seen.extend(current) or tunable)
    measured = tune._measured
    monkeypatch.setattr(tune, "_measured", lambda tunable, _, effort: measured(tunable, configs, effort, gpu))
    monkeypatch.setattr(arch, "num_sms", lambda _: 132)
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(8, 8, device="cuda:1")
    tkq.tune(tkq.gemm, x, x, effort=EFFORT)
    assert len(seen) > 2 and set(seen) == {torch.device("cuda:1")}


def test_what_was_found_can_be_ignored(hopper):
    kind, asked, planned, other, _ = gemm_kind()
    tuned.write(asked, other, {})
    runtime.ignore_tuned()
    assert call._launcher(kind, None)[0].args[1] == planned
    runtime.ignore_tuned(False)
    call.clear()
    assert call._launcher(kind, None)[0].args[1] == other


def test_memory_shared_with_out(hopper):
    a, b = torch.ones(64, 64).bfloat16(), torch.ones(64, 64).bfloat16()
    with pytest.raises(ValueError, match="out shares memory with a"):
        call.tunable(a, b, out=a)
    c = torch.ones(64, 64).bfloat16()
    assert call.tunable(a, b, c=c, beta=1.0, out=c).result is c


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
    configs = [Config(raster_group=i + 1) for i in range(len(milliseconds))]
    forgotten = []

    def made(config, out, x):
        result = (results or {}).get(config.raster_group, 0)
        return result(out, x) if callable(result) else out.copy_(x + result)

    tunable = chosen.Tunable(problem(), call.CONFIGS, (torch.ones(130, 70), None), torch.empty(130, 70),
                             lambda config, out, x, _: made(config, out, x),
                             lambda: forgotten.append(1))
    return tunable, InTurn(milliseconds), configs


def test_the_fastest_wins_and_is_recorded():
    tunable, gpu, configs = fake_call((1.0, 2.0, 0.8, 1.1))
    found = tune._measured(tunable, configs, EFFORT, gpu)
    assert found.chosen == str(configs[2]) and found.gain == pytest.approx(1.25) and not found.failed
    assert list(found.times) == [str(c) for c in configs]
    assert json.loads(problem().path.read_text())["gain"] == found.gain
    assert tune._known(tunable) == found


def test_the_plan_stays_where_others_are_hardly_faster():
    tunable, gpu, configs = fake_call((1.0, 0.998, 1.0))
    found = tune._measured(tunable, configs, EFFORT, gpu)
    assert found.chosen == str(configs[0]) and found.gain == 1.0


def test_one_with_another_result_is_left_out():
    tunable, gpu, configs = fake_call((1.0, 0.5, 0.9), results={2: 5.0, 3: 1e-4})
    found = tune._measured(tunable, configs, EFFORT, gpu)
    assert found.chosen == str(configs[2]) and "off by" in found.failed[str(configs[1])]


def test_one_that_writes_nothing_or_a_corner_wrong_is_left_out():
    def corner(out, x):
        out.copy_(x)[129, 64:] += 1
        return out

    tunable, gpu, configs = fake_call((1.0, 0.5, 0.6, 0.9), results={2: lambda out, x: out, 3: corner})
    found = tune._measured(tunable, configs, EFFORT, gpu)
    assert found.chosen == str(configs[3]) and list(found.failed) == [str(configs[1]), str(configs[2])]


@pytest.mark.parametrize("at_once", (1 << 26, 300_000, 1))
def test_the_worst_piece_of_a_row_counts(at_once, monkeypatch):
    monkeypatch.setattr(tune, "MOST_JUDGED", at_once)
    x = torch.randn(1000, 1000)
    y = x.clone()
    y[64:72, 64:72] = 0
    assert (y - x).norm() / x.norm() < tune.ERROR < tune._off(y, x)
    y = x.clone()
    y[999] *= 1.5
    assert (y - x).norm() / x.norm() < tune.ERROR < tune._off(y, x)
    assert tune._off(x.bfloat16(), x) < tune.ERROR and tune._off(1e30 * x, 1e30 * x) == 0


def test_memory_for_results_is_nan():
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32):
        x = torch.zeros(9, 32).to(dtype)[:, 3:20]
        y = tune._blank(x)
        assert y.float().isnan().all() and y.stride() == x.stride() and (y.data_ptr() - x.data_ptr()) % 16 == 0


def test_results_that_are_not_finite():
    x = torch.tensor([1.0, float("nan"), float("inf"), -2.0])
    assert tune._off(x, x) == 0 and tune._off(torch.zeros(4), x) > 0.5
    assert tune._off(torch.full((4,), float("nan")), torch.ones(4)) > 0.5


def test_copies_are_laid_out_as_the_originals():
    wide = torch.randn(40, 64).bfloat16()
    for x in (wide, wide.t(), wide[:, 3:35], wide[::2, 8:40], wide[1:2].expand(9, 64), wide[:0], torch.ones(())):
        y, nothing = tune._copies((x, None))
        assert nothing is None and torch.equal(x, y) and x.stride() == y.stride()
        if x.numel():
            assert (x.data_ptr() - y.data_ptr()) % 16 == 0 and x.data_ptr() != y.data_ptr()


def test_what_is_wrong_is_named():
    a = torch.ones(8, 8).bfloat16()
    with pytest.raises(ValueError, match="tkq.gemm, tkq.fp8_gemm, tkq.grouped_gemm"):
        tkq.tune(torch.matmul, a, a)
    with pytest.raises(ValueError, match="cpu"):
        tkq.tune(tkq.gemm, a, b=a)


def test_gpus_of_one_name_and_other_numbers_of_multiprocessors_are_of_two_kinds(monkeypatch):
    monkeypatch.setattr(arch, "_properties", lambda index: arch._Assumed((132, 114)[index], "a GPU"))
    assert arch.model("cuda:0") != arch.model("cuda:1")
