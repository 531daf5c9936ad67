"""Compiling ahead of a benchmark: what is called, in which order, by which process; nothing is timed, nothing tuned."""
import subprocess
import types

import pytest
import torch
import torch._inductor.config as inductor

from bench import __main__ as front
from bench.core import ahead, command, command_line, harness, ops
from bench.core.command import Job
from bench.ops import attention_forward
from bench.peers import common


def job(shape, op="op", names=(), called=None):
    note = lambda x: called.append((shape, "tkq"))
    return Job(harness.Question("one", op, shape, "GB/s", 1.0), note, "made up", names, lambda i: (i,), None)


def test_those_of_a_kind_are_far_apart():
    jobs = [job(f"B1 S{s} H16 D{d} full") for d in (64, 128) for s in (1, 2, 3)] + [job("M1 N1", "norm")]
    assert [j.question.shape for j in ahead.in_turn(jobs)] == [
        "B1 S1 H16 D64 full", "B1 S1 H16 D128 full", "M1 N1", "B1 S2 H16 D64 full", "B1 S2 H16 D128 full",
        "B1 S3 H16 D64 full", "B1 S3 H16 D128 full"]
    dense = list(attention_forward.dense(attention_forward.SHAPES))
    first = ahead.in_turn(dense)[:6]  # of three head dims, full and causal: every kernel of FA4's once
    assert len({(j.question.shape.split()[2:4][1], j.question.shape.split()[-1]) for j in first}) == 6


def test_each_process_has_its_share_and_no_choice_by_timing_is_stored(monkeypatch):
    done = []
    run = types.SimpleNamespace(warm=lambda j: done.append(j.question.shape), warm_calls=lambda make: done.append(make))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with inductor.patch(autotune_local_cache=True):
        for i in range(2):
            ahead.compile_part(run, ["calls"], [job("M1"), job("M2", "b"), job("M3")], (i, 2))
            assert inductor.autotune_local_cache is False
    assert done == ["calls", "M2", "M1", "M3"]  # M3 is the second of its kind


def test_what_peers_in_triton_choose_beside_others_is_not_kept(monkeypatch):
    seen = {}
    monkeypatch.setattr(subprocess, "Popen", lambda arguments, env: seen.update(env))
    ahead._process([])
    assert (seen["TRITON_CACHE_AUTOTUNING"], seen["FLA_CACHE_RESULTS"]) == ("0", "0")


def test_libraries_roofs_and_what_tunes_itself_are_not_called(monkeypatch, tmp_path, capsys):
    called = []
    names = ("QuACK", "QuACK tuned", "torch.compile", "torch.compile autotuned", "torch", "cuBLAS", "copy", "Liger")
    monkeypatch.setitem(common.PEERS, "made up", {name: lambda name=name: lambda x: called.append(("M1", name))
                                                for name in names})
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    run = command.Run(tmp_path / "never.json", 1.0, command.QUICK, ("Liger",))
    run.warm(job("M1", names=names, called=called))
    assert called == [("M1", "tkq"), ("M1", "QuACK"), ("M1", "torch.compile")]
    assert set(ops.TUNING) | set(ops.LIBRARIES) <= {name for found in common.PEERS.values() for name in found} | {
        peer for against in ops.AGAINST.values() for peer in against}

    def full(i):
        raise torch.cuda.OutOfMemoryError("others fill it")

    run.warm(Job(job("M2").question, None, "made up", (), full, None))
    assert "op M2: OutOfMemoryError: others fill it" in capsys.readouterr().out

    made = lambda: {"x + x": harness.Call(lambda: called.append("x")), "op Liger": harness.Call(lambda: 1 / 0),
                    "op QuACK, recorded": harness.Call(lambda: 1 / 0)}
    run.warm_calls(made)
    assert called[-1] == "x" and run.report.problems == [] and run.report.costs == []
    said = capsys.readouterr().out
    assert "call of op QuACK, recorded: ZeroDivisionError" in said and "Liger" not in said


class Process:
    def __init__(self, arguments, late):
        self.arguments, self.late, self.killed = arguments, late, False

    def wait(self, timeout=None):
        if self.late and not self.killed:
            raise subprocess.TimeoutExpired("python", timeout)

    def kill(self):
        self.killed = True


def test_processes_that_take_too_long_are_ended(capsys):
    made = []

    def start(arguments):
        made.append(Process(arguments, late=len(made) == 1))
        return made[-1]

    ahead.compile_all(["rmsnorm", "--warm", "3"], 3, 0.0, start)
    assert [p.arguments[-2:] for p in made] == [["--warm-part", f"{i}/3"] for i in range(3)]
    assert [p.killed for p in made] == [False, True, False]
    assert "compiled ahead in 3 processes: 0 s; 1 were ended after 0 s" in capsys.readouterr().out


@pytest.mark.parametrize("argv, timed", ((["--warm", "2"], True), (["--warm-only", "2"], False), ([], True)))
def test_the_command_compiles_first_where_it_is_asked_to(argv, timed, monkeypatch, tmp_path):
    did = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(ahead, "compile_all", lambda given, n, seconds: did.append(("compiled", n)))
    monkeypatch.setattr(front, "measure", lambda options: did.append("timed") or 0)
    assert front.main(["rmsnorm", *argv, "--out", str(tmp_path)]) == 0
    assert did == [("compiled", 2)] * bool(argv) + ["timed"] * timed


def test_a_process_knows_the_runs_cases_and_calls(monkeypatch, tmp_path):
    found = {}
    monkeypatch.setattr(front, "ignore_tuned", lambda: None)
    monkeypatch.setattr(ahead, "compile_part", lambda run, calls, jobs, part: found.update(
        calls=len(calls), shapes=[j.question.shape for j in jobs], part=part, without=run._without))
    usual = ["softmax", "--sections", "forward", "--against", "quack", "--out", str(tmp_path), "--warm-part", "1/4"]
    assert front.warm_part(command_line.parse(usual)) == 0
    assert found["calls"] == 1 and len(found["shapes"]) == 9 and found["part"] == (1, 4)
    assert {"Liger", "torch", "torch.compile"} <= set(found["without"]) and "QuACK" not in found["without"]
    front.warm_part(command_line.parse([*usual, "--no-calls", "--part", "1/2"]))
    assert found["calls"] == 0 and len(found["shapes"]) == 4
    front.warm_part(command_line.parse([*usual, "--calls-only"]))
    assert found["calls"] == 1 and found["shapes"] == []
