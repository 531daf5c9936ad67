"""The processes that tests fork for programs: what is in them, and that a program's failure is seen."""
import subprocess

import pytest

from tests.helpers.process import fresh

SHOWN = """
import os, sys
print(*sys.argv[1:], os.getcwd(), os.environ.get("TKQ_OF_TESTS"), "torch" in sys.modules)
print(sorted({name.partition(".")[0] for name in sys.modules} & {"tkq", "tests", "cutlass", "pytest", "tvm_ffi"}))
"""


def test_a_program_has_what_it_is_given_and_nothing_of_ours(tmp_path):
    for value in ("a", "b"):  # and nothing of the one before it
        done = fresh.run(SHOWN + "import tkq; tkq.softmax", "x y", 3, cwd=tmp_path, env={"TKQ_OF_TESTS": value})
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == f"x y 3 {tmp_path} {value} True\n[]\n"


def test_a_file_is_run_as_a_script(tmp_path):
    (tmp_path / "beside.py").write_text("HERE = 1\n")
    (tmp_path / "script.py").write_text("import sys\nfrom beside import HERE\nprint(__name__, __file__, sys.argv)\n")
    path = str(tmp_path / "script.py")
    assert fresh.run(tmp_path / "script.py").stdout == f"__main__ {path} {[path]}\n"


@pytest.mark.parametrize("program, status, words", (
    ("1 / 0", 1, "ZeroDivisionError"), ("raise SystemExit(3)", 3, ""), ("raise SystemExit('a word')", 1, "a word\n"),
    ("import os; os.kill(os.getpid(), 9)", -9, ""), ("no python", 1, "SyntaxError"), ("exit()", 0, "")))
def test_how_it_ends_is_seen(program, status, words):
    done = fresh.run(program)
    assert done.returncode == status and words in done.stderr and bool(words) == bool(done.stderr)


def test_threads_and_what_is_registered_are_waited_for():
    done = fresh.run("import atexit, threading\natexit.register(print, 'last')\n"
                     "threading.Timer(0.1, print, ('thread',)).start()")
    assert done.stdout == "thread\nlast\n"


def test_one_that_does_not_end_is_ended_and_the_next_is_run():
    with pytest.raises(subprocess.TimeoutExpired):
        fresh.run("import time; time.sleep(60)", imports="colorsys", timeout=1)
    assert fresh.run("print(1)", imports="colorsys").stdout == "1\n"


def test_what_is_done_before_the_imports():
    before = "assert 'colorsys' not in sys.modules\nsys.modules['wave'] = None"
    done = fresh.run("import sys, wave", before=before, imports="colorsys")
    assert done.returncode == 1 and "import of wave halted" in done.stderr
    done = fresh.run("import sys; print('colorsys' in sys.modules)", before=before, imports="colorsys")
    assert done.stdout == "True\n"
