"""Runs that wait for each other, and that end by themselves."""
import contextlib
import subprocess
import sys
import time

import pytest

from bench import __main__ as front
from bench.core import turns

HOLD = """
import sys, time, pathlib
from bench.core import turns
held = turns.wait(pathlib.Path(sys.argv[1]))
print("in", flush=True)
sys.stdin.read()
"""


def test_one_has_the_file_at_a_time(tmp_path):
    start = lambda: subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "turn")], stdin=subprocess.PIPE,
                                     stdout=subprocess.PIPE, text=True)
    first = start()
    assert first.stdout.readline() == "in\n"
    second = start()
    with pytest.raises(subprocess.TimeoutExpired):
        second.wait(timeout=0.5)
    assert (tmp_path / "turn").read_text() == f"{first.pid}\n"
    first.kill()  # as a hard limit does
    assert second.stdout.readline() == "in\n"
    assert (tmp_path / "turn").read_text() == f"{second.pid}\n"
    second.communicate("")
    first.communicate()
    assert second.returncode == 0


def test_a_process_that_hangs_is_ended():
    code = "from bench.core import turns\nturns.end_after(0.5)\nimport time\ntime.sleep(60)"
    begin = time.monotonic()
    assert subprocess.run([sys.executable, "-c", code]).returncode < 0
    assert time.monotonic() - begin < 20
    code = "from bench.core import turns\nturns.end_after(1)\nturns.end_after(0)\nimport time\ntime.sleep(1.5)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_run_gets_ready_and_waits_before_it_measures(monkeypatch, tmp_path):
    did = []
    monkeypatch.setattr(front.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(turns, "get_ready", lambda against: did.append(tuple(against)))
    monkeypatch.setattr(turns, "wait", lambda path: did.append(path.name) or contextlib.nullcontext())
    monkeypatch.setattr(turns, "end_after", lambda seconds: did.append(seconds))
    monkeypatch.setattr(front, "measure", lambda options: did.append("timed") or 0)
    words = ["rmsnorm", "--out", str(tmp_path), "--against", "quack"]
    assert front.main([*words, "--turn", str(tmp_path / "turn"), "--at-most", "90"]) == 0
    assert front.main(words) == 0
    assert did == [("quack",), "turn", 90.0, "timed", 0, 0, "timed", 0]  # tables and pictures may take their time


def test_what_is_not_installed_is_no_reason_to_stop(monkeypatch):
    monkeypatch.setitem(turns.MODULES, "quack", ("no_such_module",))
    turns.get_ready(("quack", "torch"))
