"""`python -m tkq bench`: a whole run on a scripted GPU. tests/cpu/bench/test_bench_command_line.py has its options."""
import dataclasses
import io
import json
import re

import pytest
import torch

from bench import __main__ as front
from bench.core import command, command_line, harness, ops
from bench.core.command import Bench, Job
from bench.core.progress import Progress
from bench.core.results import Report
from bench.peers import common
from bench.report import plots, readme_table
from tests.cpu.bench.test_bench_harness import FakeGpu
from tkq.testing import timing

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")


# ---- a run -------------------------------------------------------------------------------------------------------


def absent():
    raise ModuleNotFoundError("No module named 'gone'")


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs the command on two operations of a made-up file; ours takes `slow` times as long."""
    slow, pictures = {"tkq": 1.0}, []
    gpu = FakeGpu(lambda name, turn: {"tkq": slow["tkq"], "QuACK": 2.0, "copy": 0.5}[name])
    gpu.host_us = lambda *_: 7.5

    def jobs(section):
        for n in (1, 2, 4):
            question = harness.Question(section, section, f"M8 N{n}", "GB/s", 1e9 * n)
            yield Job(question, lambda x: "tkq", "made up", ("QuACK", "FA4", "copy"), lambda i: (torch.zeros(8),),
                      lambda name, *_: None if name == "copy" else 1e-3)

    made = Bench("made_up", "Made up.", {name: lambda _, name=name: jobs(name) for name in ("one", "two")},
                 calls=lambda: {"x + x": harness.Call(lambda: None)}, effort=timing.Effort(7, 0.01))
    named = {name: (lambda name=name: lambda x: name) for name in ("QuACK", "copy")}
    monkeypatch.setitem(common.PEERS, "made up", {**named, "FA4": absent})
    monkeypatch.setattr(ops, "OPS", {name: (ops.Part("made_up", (name,)),) for name in ("one", "two")})
    monkeypatch.setattr(ops, "bench_of", lambda name: made)
    monkeypatch.setattr(timing, "Gpu", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(harness, "device_copy", lambda: 3000.0)
    monkeypatch.setattr(front, "ignore_tuned", lambda: None)
    write = plots.write
    monkeypatch.setattr(plots, "write", lambda *found: write(*found) if pictures else [])
    monkeypatch.setattr(command.Environment, "here", classmethod(lambda cls, driver: readme_environment()))

    def go(*argv, ours=1.0, out="out", draw=False):
        slow["tkq"], pictures[:] = ours, [1] * draw
        status = front.main([*argv, "--out", str(tmp_path / out)])
        path = tmp_path / out / "made_up.json"
        return status, Report.from_json(path.read_text()) if path.exists() else None

    return go


def readme_environment():
    return next(iter(readme_table.reports().values())).environment


def test_a_run_leaves_results_tables_and_pictures(run, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    status, report = run("one", draw=True)
    assert status == 0 and [case.shape for case in report.cases] == ["M8 N1", "M8 N2", "M8 N4"]
    assert report.copy_gbs == 3000.0 and [cost.name for cost in report.costs] == ["CPU per eager call: x + x"]
    first = report.cases[0]
    assert first.ratios() == {"QuACK": 2.0, "copy": 0.5} and first.seconds is not None
    assert first.missing == {"FA4": "ModuleNotFoundError: No module named 'gone'"}
    text = (tmp_path / "out" / "results.md").read_text()
    assert "| `one` | M8 N1 | tkq | 1000.00 us |  | 0.0% | 1000 GB/s |  | 2 | 7.5 us | 1.0e-03 |  |  |" in text
    assert "Missing: FA4: ModuleNotFoundError" in text and "Device copy in this run: 3000 GB/s" in text
    assert "| `one` | QuACK; not installed: FA4 | 3 | 2.00 | 2.00 | 2.00 |" in text
    assert sorted(p.name for p in (tmp_path / "out" / "plots").iterdir()) == [
        "made_up_one.png", "made_up_one.svg", "overview.png", "overview.svg"]
    said = capsys.readouterr()
    assert "[........................] 1/3 " in said.err and "s  one M8 N1\n" in said.err
    assert "Bounds missed: 0; undecided, for a baseline was not timed: 0" in said.out


def test_a_run_in_pieces_is_one(run, tmp_path):
    for i in range(2):
        assert run("--part", f"{i}/2", "--no-calls")[0] == 0
    status, report = run("two", "--match", "N4", ours=1.5)  # once more: the later one counts
    assert status == 0 and len(report.cases) == 6
    again, = (case for case in report.cases if (case.op, case.shape) == ("two", "M8 N4"))
    assert again.ratios()["QuACK"] == pytest.approx(2 / 1.5)
    other = json.loads((tmp_path / "out" / "made_up.json").read_text())
    other["environment"]["device"] = "another card"
    (tmp_path / "out" / "made_up.json").write_text(json.dumps(other))
    assert front.main(["one", "--out", str(tmp_path / "out")]) == 2  # nothing is mixed


def test_a_run_that_was_ended_goes_on_where_it_was(run, tmp_path, capsys):
    assert run("--match", "N1")[0] == 0 and run("one", "--match", "N2", ours=1.5)[0] == 0
    status, report = run("--resume", ours=3.0)
    ratios = {(case.op, case.shape): round(case.ratios()["QuACK"], 3) for case in report.cases}
    assert status == 0 and ratios == {("one", "M8 N1"): 2.0, ("two", "M8 N1"): 2.0, ("one", "M8 N2"): 1.333,
                                      ("two", "M8 N2"): 0.667, ("one", "M8 N4"): 0.667, ("two", "M8 N4"): 0.667}
    assert "calls of made_up" not in capsys.readouterr().out.rpartition("3000")[2]  # they have been priced
    assert run("--resume")[0] == 0 and "no cases left" in capsys.readouterr().out


def test_what_is_timed_otherwise_now_is_timed_again(run, tmp_path, monkeypatch):
    """Of short kernels the times between others; of a peer that was not asked for, all."""
    assert run("one", "--no-calls")[0] == 0
    path = tmp_path / "out" / "made_up.json"
    for what in ("short", "peers", "short,peers"):
        assert run("--no-calls", "--again", what)[0] == 0  # nothing: a millisecond is long, and both were asked for
    first, *others = (before := Report.from_json(path.read_text())).cases
    quick = tuple(dataclasses.replace(t, times_ms=(0.01,) * 7) for t in first.comparison.timings)
    short = dataclasses.replace(first, comparison=dataclasses.replace(first.comparison, timings=quick))
    without = dataclasses.replace(others[0], missing={})
    for what, again in (("short", ["M8 N1"]), ("peers", ["M8 N2"]), ("short,peers", ["M8 N1", "M8 N2"])):
        dataclasses.replace(before, cases=[short, without, *others[1:]]).save(path)
        status, report = run("--no-calls", "--again", what, ours=4.0)
        assert status == 0 and [case.shape for case in report.cases if case.ratios()["QuACK"] == 0.5] == again
        assert len(report.cases) == 3  # none that the folder lacks


def test_calls_are_priced_alone(run, monkeypatch, capsys):
    assert run("one", "--no-calls")[0] == 0
    timed = []
    monkeypatch.setattr(harness, "compare", lambda *_, **__: timed.append(1))
    monkeypatch.setattr(harness, "device_copy", lambda: timed.append(1))
    status, report = run("two", "--calls-only")
    assert status == 0 and not timed and [cost.name for cost in report.costs] == ["CPU per eager call: x + x"]
    assert [case.op for case in report.cases] == ["one"] * 3 and report.copy_gbs == 3000.0  # of the first run
    said = capsys.readouterr()
    assert re.search(r"1/1  \d+ s  calls of made_up", said.err) and "CPU per eager call: x + x" in said.out
    assert run("--calls-only", "--resume")[0] == 0 and "no calls" in capsys.readouterr().out
    assert run("--calls-only", "--part", "1/2")[0] == 1  # the other part has the file's first case
    assert run("one", "--calls-only", "--match", "nothing", out="none") == (1, None)


def test_all_files_calls_are_made_before_the_first_is_priced(run, monkeypatch):
    did = []

    def made(name):
        bench = ops.bench_of("made_up")
        call = harness.Call(lambda: did.append(name))
        return dataclasses.replace(bench, name=name, calls=lambda: {"x + x": call})

    benches = {name: made(name) for name in ("first", "second")}
    monkeypatch.setattr(ops, "OPS", {"one": tuple(ops.Part(name, ("one",)) for name in benches)})
    monkeypatch.setattr(ops, "bench_of", benches.get)
    monkeypatch.setattr(harness, "cpu_times", lambda calls: did.extend(calls) or [])
    assert run("--calls-only")[0] == 0
    assert did == ["first", "second", "first", "CPU per eager call: x + x", "second", "CPU per eager call: x + x"]


def test_a_call_that_fails_is_named_and_the_others_are_priced(run, monkeypatch):
    working = dataclasses.replace(ops.bench_of("made_up"), calls=lambda: {
        "x + x": harness.Call(lambda: None), "one": harness.Call(lambda: 1 / 0)})
    monkeypatch.setattr(ops, "bench_of", lambda name: working)
    status, report = run("one", "--calls-only")
    assert status == 1 and report.problems == ["call of one: ZeroDivisionError: division by zero"]
    assert [cost.name for cost in report.costs] == ["CPU per eager call: x + x"]


def test_folders_of_results_are_joined(run, tmp_path, capsys):
    for i in range(2):
        assert run("--part", f"{i}/2", out=f"part{i}")[0] == 0
    folders = [word for i in range(2) for word in ("--results", str(tmp_path / f"part{i}"))]
    status, report = run(*folders, out="whole")
    assert status == 0 and len(report.cases) == 6 and (tmp_path / "whole" / "results.md").exists()
    with pytest.raises(SystemExit):
        command_line.parse(folders)
    assert "--out says where they are joined" in capsys.readouterr().err
    other = json.loads((tmp_path / "part0" / "made_up.json").read_text())
    other["environment"]["device"] = "another card"
    (tmp_path / "part0" / "made_up.json").write_text(json.dumps(other))
    assert run(*folders, out="mixed") == (2, None)


def test_what_a_file_measures_once_is_in_the_part_of_its_first_case():
    names = ["norms"] * 3 + ["gemm"] + ["rope"] * 2
    found = [front._begun_here(names, i, 4) for i in range(4)]
    assert found == [{"norms", "rope"}, set(), set(), {"gemm"}]
    assert front._begun_here(names, 0, 1) == set(names)


def test_what_got_slower_is_said_and_fails(run, tmp_path, capsys):
    assert run("one", "--no-calls", out="old")[0] == 0
    old = str(tmp_path / "old" / "made_up.json")
    assert run("one", "--no-calls", "--compare", old)[0] == 0
    assert "3 compared: 0 slower, 0 faster, 3 within the spread." in capsys.readouterr().out
    assert run("one", "--no-calls", "--compare", str(tmp_path / "old"), ours=1.2)[0] == 1
    assert "3 compared: 3 slower" in capsys.readouterr().out
    assert front.main(["--results", str(tmp_path / "out"), "--compare", old]) == 1  # the same, without measuring
    renamed = tmp_path / "before.json"
    renamed.write_text((tmp_path / "old" / "made_up.json").read_text())
    assert front.main(["--results", str(tmp_path / "out"), "--compare", str(renamed)]) == 1


def test_a_case_that_cannot_run_is_named_and_the_others_run(run, monkeypatch):
    compare = harness.compare

    def sometimes(question, *rest, **more):
        if question.shape == "M8 N2":
            raise RuntimeError("out of memory")
        return compare(question, *rest, **more)

    monkeypatch.setattr(harness, "compare", sometimes)
    status, report = run("one", "--no-calls")
    assert status == 1 and report.problems == ["one M8 N2: RuntimeError: out of memory"] and len(report.cases) == 2
    monkeypatch.setattr(harness, "compare", compare)
    status, report = run("one", "--no-calls", "--match", "N2")
    assert status == 0 and report.problems == [] and len(report.cases) == 3


def test_a_file_with_a_main_of_its_own_that_fails_does_not_stop_the_run(run, monkeypatch, capsys):
    from bench.studies import sustained

    def fails(argv):
        raise RuntimeError("no clock")

    monkeypatch.setattr(sustained, "main", fails)
    status, report = run("one", "sustained", "--no-calls")
    said = capsys.readouterr().out
    assert status == 1 and len(report.cases) == 3
    assert "PROBLEM sustained: RuntimeError: no clock" in said and "results.md" in said


def test_sustained_gets_what_to_leave_out(run, monkeypatch):
    from bench.studies import sustained

    calls = []
    monkeypatch.setattr(sustained, "main", lambda argv: calls.append(argv) or 0)
    run("one", "sustained", "--no-calls")
    run("one", "sustained", "--no-calls", "--against", "quack-tuned,torch")
    assert [argv[:1] + argv[2:3] for argv in calls] == [["--out", "--without"]] * 2
    assert calls[0][3] == "QuACK tuned" and "QuACK tuned" not in calls[1][3].split(",") and "QuACK" in calls[1][3]


def test_no_case_is_left(run):
    assert run("one", "--match", "nothing")[0] == 1


# ---- the bar -----------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_bar_stays_below_what_is_said(capsys):
    now, screen = iter((0.0, 0.0, 10.0)), Terminal()  # its own beginning, and two steps'
    bar = Progress(4, screen, clock=lambda: next(now))
    bar.step("first")
    bar.say("a line")
    bar.step("second")
    assert capsys.readouterr().out == "a line\n"
    assert screen.getvalue() == (
        f"\r\x1b[K[{'.' * 24}] 1/4  0 s  first\r\x1b[K[{'.' * 24}] 1/4  0 s  first"
        f"\r\x1b[K[{'#' * 6}{'.' * 18}] 2/4  10 s  second")


def test_the_time_left_follows_from_the_usual_step():
    now, lines = iter((0.0, 5.0, 65.0, 66.0, 68.0)), io.StringIO()  # 5 s before the first, which takes 60
    bar = Progress(6, lines, clock=lambda: next(now))
    for what in ("first", "second", "third", "fourth"):
        bar.step(what)
    assert [line.split("]")[1] for line in lines.getvalue().splitlines()] == [
        " 1/6  5 s  first", " 2/6  65 s  second", " 3/6  66 s, about 4 s left  third",
        " 4/6  68 s, about 6 s left  fourth"]
