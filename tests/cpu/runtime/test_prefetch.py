"""tkq.prefetch in programs that found tkq by other ways than an installation, and when its process ends early."""
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

import pytest

from tests.helpers.process import forked, fresh
from tkq.runtime.system import child
from tkq.warmup import models, prefetch

CHECKOUT = pathlib.Path(__file__).resolve().parents[3]
SMALL = "tkq.warmup.models.Model(64, 4, 4, 16, 96, 1000)"
PROGRAM = f"""
import sys
sys.path.insert(0, sys.argv[1])
import tkq.warmup.models
assert tkq.__file__.startswith(sys.argv[1])
tkq.runtime.configure(sys.argv[2])
handle = tkq.prefetch({SMALL}, ops=["swiglu"])
try:
    handle.wait(0.01)
except TimeoutError as error:
    assert "after 0.01 s" in str(error) and not handle.done
else:
    sys.exit("two kernels were compiled in 0.01 s")
print(handle.wait(100))
assert handle.done and handle.wait() == handle.wait(1)
"""


@pytest.fixture
def elsewhere(tmp_path):
    """A copy of tkq that nothing knows of, below a name with spaces and a colon."""
    place = tmp_path / "a place: of its own"
    shutil.copytree(CHECKOUT / "tkq", place / "tkq")
    return place


def test_it_finds_what_the_program_found(elsewhere, tmp_path):
    """And compiles it in the background, into the cache that the program has chosen."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = fresh.run(PROGRAM, elsewhere, tmp_path / "cache", cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 kernels, 2 of them compiled now, 0 wrong")
    assert len(list((tmp_path / "cache").glob("gated-*"))) == 2


@pytest.mark.parametrize("of, words", [(1, "int is no configuration"), ("llama-9b", "no model 'llama-9b'")])
def test_what_is_no_model_is_an_argument_s(of, words):
    with pytest.raises(ValueError, match=f"prefetch: of: {words}"):
        prefetch.prefetch(of)


def test_a_child_has_the_path_of_this_process(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [str(tmp_path), "relative", *sys.path])
    (tmp_path / "told.py").write_text("import json, sys\nprint(json.dumps([sys.path, sys.argv[1:], __name__]))\n")
    done = subprocess.run(child.command("told", "a", "b c"), text=True, capture_output=True, check=True)
    path, words, name = json.loads(done.stdout)
    assert path[:2] == [str(tmp_path), os.path.abspath("relative")] and str(CHECKOUT) in path
    assert words == ["a", "b c"] and name == "__main__"


@pytest.fixture
def started(monkeypatch):
    """A function that starts a program in the place of prefetch's process."""
    handles = []

    def start(program):
        monkeypatch.setattr(child, "command", lambda *_: [sys.executable, "-c", program])
        handles.append(prefetch.prefetch(models.Model(64, 4, 4, 16, 96, 1000), ops=["swiglu"]))
        return handles[-1]

    yield start
    for handle in handles:
        handle.stop()


def ended(handle):
    while not handle.done:
        time.sleep(0.01)
    handle._watcher.join(10)


@pytest.mark.parametrize("program, words", (
    ("raise ImportError('no module of this name')", "no module of this name"), ("import os; os._exit(3)", "status 3"),
    ("import os; os.kill(os.getpid(), 9)", "it was ended"), ("print('it was this'); exit(1)", "it was this"),
    (r"import sys; sys.stderr.buffer.write(b'\xff\xfe no text'); exit(1)", "no text")))
def test_one_that_ends_early_says_so(started, program, words):
    _, said = forked.with_warnings(lambda: ended(started(program)))
    assert len(said) == 1 and "ended before all was compiled" in said[0] and words in said[0]
    handle = started(program)
    with pytest.raises(RuntimeError, match=f"(?s)^prefetch: .*{words}"):
        handle.wait(20)


def test_one_that_is_through_or_stopped_says_nothing(started):
    assert forked.with_warnings(lambda: ended(started("print('2 kernels')")))[1] == []
    assert forked.with_warnings(lambda: started("import time; time.sleep(60)").stop())[1] == []


def test_what_it_says_fills_no_pipe(started):
    handle = started("import sys; print('a line\\n' * 100_000, file=sys.stderr); print('x' * 100_000); print('last')")
    assert handle.wait(20) == "last"


def test_a_fork_does_not_stop_it(started):
    handle = started("import time; time.sleep(60)")
    forked.done(handle.stop)
    assert not handle.done
