"""bench.studies.sustained and bench.studies.fp8_accumulation_error where no GPU is needed."""
import json
from types import SimpleNamespace

import pytest
import torch

from bench.core.results import Reading, Report
from bench.report import readme_table
from bench.studies import fp8_accumulation_error, sustained
from tkq.testing import timing


class Batch:
    mode, note, launches = "graph", "", 1

    def __init__(self, name, log, ms):
        self.name, self.log, self.ms = name, log, ms

    def run(self, seconds, during):
        self.log.append((self.name, seconds, during is not None))
        if during:
            during()
        return self.ms


@pytest.fixture
def batches(monkeypatch):
    log = []
    monkeypatch.setattr(sustained.time, "sleep", lambda s: log.append(("sleep", s)))
    return log, {"torch": Batch("torch", log, 2.0), "tkq": Batch("tkq", log, 1.0)}


def read():
    return Reading(1500, 600.0, 50)


def test_each_burst_comes_after_a_rest(batches):
    log, found = batches
    case = sustained.case("burst", "bf16", (8, 8, 8), found, sustained.bursts(found, 3, read), (2, 3, 1), {}, 0.01)
    assert case.idle_seconds == sustained.IDLE and case.round_seconds == 0.01
    assert log[::2] == [("sleep", sustained.IDLE)] * 6
    assert [x[0] for x in log[1::2]] == ["torch", "tkq", "tkq", "torch", "tkq", "torch"]
    assert case.ratios() == {"torch": 2.0} and len(case.readings["tkq"]) == 3 and case.rate("tkq") > 0


def test_a_bench_rests_before_each_turn_that_counts(batches, monkeypatch):
    log, found = batches
    monkeypatch.setattr(timing.time, "sleep", lambda s: log.append(("sleep", s)))
    effort = timing.Effort(7, 0.1, warmup_seconds=0.1, idle_seconds=0.05)
    assert [len(x) for x in timing.take_turns(found, {}, effort, None, int).values()] == [7, 7]
    assert log[:2] == [("torch", 0.1, False), ("tkq", 0.1, False)] and log[2::2] == [("sleep", 0.05)] * 14
    log.clear()
    timing.take_turns(found, {}, timing.Effort(7, 0.1, warmup_seconds=0.1), None, int)
    assert ("sleep", 0.05) not in log and len(log) == 16


def test_sustained_turns_follow_each_other(batches):
    log, found = batches
    turns = sustained.sustained(found, 0.4, read)
    case = sustained.case("sustained", "row", (8, 16, 24), found, turns, (2, 3, 1), {}, 0.2)
    assert [(name, counted) for name, _, counted in log] == (
        [("torch", False), ("tkq", False)] + [("torch", True)] * 2 + [("tkq", True)] * 4 + [("torch", True)] * 2)
    assert [len(t.times_ms) for t in case.comparison.timings] == [4, 4]
    assert (case.shape, case.work) == ("8x16x24 sustained", 2 * 8 * 16 * 24)
    assert (case.idle_seconds, case.round_seconds) == (0.0, 0.2)
    log.clear()
    three = {"torch": found["torch"], "QuACK": Batch("QuACK", log, 3.0), "tkq": found["tkq"]}
    list(sustained.sustained(three, 0.2, read))
    assert [name for name, _, counted in log if counted] == ["torch", "QuACK", "tkq", "tkq", "QuACK", "torch"]


def test_it_says_that_it_needs_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert sustained.main([]) == 2 and fp8_accumulation_error.main([]) == 2
    assert capsys.readouterr().out.count("needs a GPU") == 2
    for wrong in (["--kinds", "fp4"], ["--shapes", "8192"], ["--shapes", "8192x8192xK"]):
        with pytest.raises(SystemExit):
            sustained.main(wrong)


@pytest.mark.parametrize("kind", ("bf16", "row"))
def test_candidates_agree(kind, monkeypatch):
    monkeypatch.setattr(sustained, "randn", lambda i, *shape: torch.randn(*shape).bfloat16())
    if kind != "bf16":
        both = lambda kind, given: (*given, *given[2:])
        one = torch.ones(128, 1), torch.ones(1, 128)
        fake = SimpleNamespace(
            PEERS={"fp8_gemm": {"torch": lambda kind: lambda a, b, *_: (a.float() @ b.float()).bfloat16()}},
            names=lambda kind: ("torch",), both_orders=both,
            operands=lambda m, n, k, kind, i: (*(torch.randn(m, k).to(torch.float8_e4m3fn) for _ in range(1)),
                                               torch.randn(n, k).to(torch.float8_e4m3fn).t(), *one))
        monkeypatch.setattr(sustained, "fp8", fake)
    makers, make = sustained.candidates(kind, 128, 128, 128)
    inputs = make(0)
    got, want = (makers[name]()(*inputs).float() for name in ("tkq", "torch"))
    assert ((got - want).norm() / want.norm()).item() < 0.01


@pytest.mark.parametrize("kind, others", (
    ("bf16", ("QuACK", "QuACK tuned", "DeepGEMM")), ("tensor", ("QuACK", "QuACK tuned")), ("row", ()),
    ("1x128_128x128", ("DeepGEMM",))))
def test_others_are_beside_where_they_have_such_a_product(kind, others):
    makers, _ = sustained.candidates(kind, 128, 128, 128)
    assert list(makers) == ["torch", *others, "tkq"] and set(others) <= set(sustained.OTHERS)


class Gpu:
    def first_calls(self, call, sets):
        return call(*sets[0]), 1e-3

    def batch(self, call, sets, calls):
        return call


def test_missing_peers_are_named_and_torch_has_to_be_there():
    def gone():
        raise ModuleNotFoundError("No module named 'quack'")

    made = lambda: lambda: "a product"
    makers = {"torch": made, "QuACK": gone, "QuACK tuned": made, "tkq": made}
    batches, missing = sustained.ready(makers, [()], ("QuACK tuned",), Gpu())
    assert list(batches) == ["torch", "tkq"]
    assert missing == {"QuACK": "ModuleNotFoundError: No module named 'quack'", "QuACK tuned": "left out (--without)"}
    with pytest.raises(ModuleNotFoundError):
        sustained.ready({**makers, "torch": gone}, [()], (), Gpu())


def test_errors_of_sums():
    truth = torch.tensor([2.0, -2.0], dtype=torch.float64)
    found = fp8_accumulation_error.error(torch.tensor([1.9, -1.9]), truth)
    assert abs(found["mean_signed"] + 0.05) < 1e-6 and abs(found["root_mean_square"] - 0.05) < 1e-6
    assert abs(fp8_accumulation_error.error(torch.tensor([1.9, -2.1]), truth)["mean_signed"]) < 1e-6


def test_sums_are_measured_and_shown(tmp_path):
    """On a CPU sums are exact but for float32; torch may lack its own."""
    found = fp8_accumulation_error.measure("cpu", (64,))
    assert [x["operands"] for x in found] == ["positive"] * 4 + ["normal"] * 4
    ours = [x for x in found if x["way"].startswith("tkq")]
    assert len(ours) == 4 and all(abs(x["mean_signed"]) < 1e-6 for x in ours)
    path = tmp_path / "fp8_sums.json"
    path.write_text(json.dumps({"device": "none", "type": "float8_e4m3fn", "errors": found}))
    text = readme_table.page(tmp_path)
    assert "## fp8 sums" in text and '| positive | 64 |' in text and 'tkq, "fast"' in text


def test_a_report_comes_back(batches):
    _, found = batches
    turns = sustained.bursts(found, 3, read)
    case = sustained.case("burst", "bf16", (8, 8, 8), found, turns, (2, 3, 1), {"QuACK": "gone"}, 0.01)
    environment = sustained.Environment.here()
    assert Report.from_json(Report(environment, [case]).to_json()).cases == [case]
