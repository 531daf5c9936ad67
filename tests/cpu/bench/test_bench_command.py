"""The command line that all files of cases share, and the cases that each of them offers."""
from types import SimpleNamespace

import pytest
import torch

from bench.core import command, harness
from bench.core.command import Bench, Job
from bench.ops import (
    attention_backward,
    attention_backward_varlen,
    attention_forward,
    cross_entropy,
    foundation,
    linear_cross_entropy,
    norm_backward,
    norms,
    pointwise,
    softmax,
)
from bench.peers import common

BENCHES = [m.BENCH for m in (foundation, norms, norm_backward, softmax, cross_entropy, linear_cross_entropy, pointwise,
                             attention_forward, attention_backward, attention_backward_varlen)]


def job(shape):
    m, n = shape
    return Job(harness.Question("one", "op", f"M{m} N{n}", "GB/s", 1.0), lambda: 0, "gemm", (), lambda i: (), None)


TWO = Bench("two", "Two sections.\nMore.", {"one": lambda shapes: map(job, shapes), "fixed": lambda _: [job((1, 1))]},
            shapes={"one": ((1, 2), (3, 4), (5, 6))}, quick=((3, 4),))


def shapes(*argv):
    options = command._options(TWO, list(argv))
    return [j.question.shape for j in command.chosen_jobs(TWO, options.sections, options)]


def test_options_choose_cases():
    assert shapes() == ["M1 N2", "M3 N4", "M5 N6", "M1 N1"]
    assert shapes("--quick") == ["M3 N4", "M1 N1"]
    assert shapes("--shapes", "7x8,9x10", "--sections", "fixed,one") == ["M1 N1", "M7 N8", "M9 N10"]
    assert shapes("--match", "M1") == ["M1 N2", "M1 N1"]


@pytest.mark.parametrize("argv, words", (
    (["--sections", "one,three"], "unknown ['three']; allowed ['one', 'fixed']"), (["--shapes", "3x"], "got '3x'"),
    (["--warm", "4/4"], "--warm: got (4, 4)"), (["--warm", "x"], "--warm: got 'x'")))
def test_what_is_not_known_is_an_error_that_names_what_is(argv, words, capsys):
    with pytest.raises(SystemExit):
        command.main(TWO, argv)
    assert words in capsys.readouterr().err


def test_warming_up_calls_each_candidate_once_and_names_what_fails(monkeypatch, tmp_path, capsys):
    called = []

    def quick(x):
        called.append(("quick", x))

    def broken(x):
        raise RuntimeError("no such card")

    monkeypatch.setitem(common.PEERS, "op", {"quick": lambda: quick, "broken": lambda: broken, "other": lambda: quick})
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    run = command.Run(tmp_path / "never.json", 1.0, command.QUICK, ("other",))
    run.warm(Job(harness.Question("one", "op", "M1", "GB/s", 1.0), lambda x: called.append(("tkq", x)), "op",
                 ("quick", "broken", "other"), lambda i: (7,), None))
    assert called == [("tkq", 7), ("quick", 7)] and "broken: RuntimeError: no such card" in capsys.readouterr().out
    assert not (tmp_path / "never.json").exists()


@pytest.mark.parametrize("bench", BENCHES, ids=lambda b: b.name)
def test_every_bench_parses_and_says_that_it_needs_a_gpu(bench, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert command.main(bench, ["--quick"]) == 2
    assert f"bench.ops.{bench.name} times kernels: it needs a GPU" in capsys.readouterr().out
    assert set(bench.default) <= set(bench.names) and set(bench.shapes) <= set(bench.sections)


@pytest.mark.parametrize("bench", [b for b in BENCHES if b.name != "pointwise"], ids=lambda b: b.name)
def test_every_case_names_peers_that_there_are(bench):
    options = command._options(bench, [])
    found = list(command.chosen_jobs(bench, bench.sections, options))
    assert found and len({(j.question.section, j.question.op, j.question.shape) for j in found}) == len(found)
    for j in found:
        assert set(j.peer_names) <= set(common.PEERS[j.peer_op])
        for bound in filter(None, (j.question.bound, j.question.roof)):
            assert set(bound.against) <= set(j.peer_names)


def test_a_call_that_fails_is_reported_and_the_others_are_priced(tmp_path):
    def broken():
        raise RuntimeError("no kernel")

    run = command.Run(tmp_path / "f.json", 10.0, command.USUAL)
    run.calls(lambda: {"peer": harness.Call(broken), "x + x": harness.Call(lambda: None)})
    assert run.report.problems == ["call of peer: RuntimeError: no kernel"]
    assert [c.name for c in run.report.costs] == ["CPU per eager call: x + x"]


def test_calls_of_peers_that_are_left_out_are_not_made(tmp_path):
    """Some compile for half a minute before they can be called."""
    run = command.Run(tmp_path / "f.json", 10.0, command.USUAL, without=("QuACK",))
    names = "x + x", "rmsnorm tkq", "rmsnorm QuACK", "rmsnorm QuACK, recorded", "rmsnorm torch, recorded"
    run.calls(lambda: {name: harness.Call(lambda: None) for name in names})
    assert [c.name.partition(": ")[2] for c in run.report.costs] == ["x + x", "rmsnorm tkq", "rmsnorm torch, recorded"]


def test_calls_that_cannot_be_made_are_reported(tmp_path):
    run = command.Run(tmp_path / "f.json", 10.0, command.USUAL)
    run.calls(lambda: {}["peer"])
    assert run.report.problems == ["calls: KeyError: 'peer'"] and not run.report.costs


def test_what_comes_after_the_cases_may_fail(tmp_path, capsys):
    run = command.Run(tmp_path / "f.json", 10.0, command.USUAL)
    bench = Bench("two", "", {}, after=lambda options: 1 // 0)
    assert command._conclude(bench, run, None) == 1
    assert "PROBLEM after the cases: ZeroDivisionError" in capsys.readouterr().out


def test_a_mean_that_misses_is_a_problem(capsys):
    case = lambda ratio: SimpleNamespace(against_best=lambda: ratio and ("peer", ratio))
    assert command.mean_misses("all", [], 1.0) == command.mean_misses("all", [case(None)], 1.0) == []
    assert command.mean_misses("all", [case(0.5), case(2.0)], 1.0) == []
    assert "all: geomean 1.000x the best baseline, bound 1.0, 2 shapes\n" in capsys.readouterr().out
    assert command.mean_misses("all", [case(0.5), case(1.0)], 1.0) == [
        "all: geomean 0.707x the best baseline, bound 1.0"]
    assert command.mean_misses("all", [case(0.5), case(1.0)], 1.0, of=3) == []
    assert "2 of 3 shapes: undecided" in capsys.readouterr().out
