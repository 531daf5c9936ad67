"""A fork, at any moment: the child is not held up by what its parent was doing, and holds nothing of its parent's."""
import os
import select
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests.helpers.process import forked, fresh
from tkq.runtime.call import dispatch, replay
from tkq.runtime.compile import build, keys
from tkq.runtime.compile.cache import Cache, private_folder
from tkq.runtime.compile.recipe import Recipe
from tkq.runtime.system import forks, locks

DATA, NOTE = b"\x7fELF" + bytes(100), {"kind": "static", "symbol": "x"}
RECIPES = [Recipe("a:b", (number,)) for number in range(3)]


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "_cache", Cache(tmp_path, before=()))
    monkeypatch.setattr(keys, "entry_name", lambda recipe, *_: f"kernel-{recipe.args[0]}")
    return build.cache()


class Busy:
    """A thread that does something until it is let go."""

    def __init__(self, work):
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=work, args=(self.stay,))

    def stay(self):
        self.begun.set()
        self.may_end.wait(60)

    def __enter__(self):
        self.thread.start()
        assert self.begun.wait(20)
        return self

    def __exit__(self, *_):
        self.may_end.set()
        self.thread.join()


def test_while_a_thread_compiles(store, monkeypatch):
    """Here and in the child, one recipe after the other."""
    monkeypatch.setattr(build, "_built", lambda recipe, *_: stay() if recipe == RECIPES[0] else (DATA, NOTE))

    def stay():
        busy.stay()
        return DATA, NOTE

    busy = Busy(lambda stay: build.ensure(RECIPES[0]))
    with busy:
        assert forked.done(lambda: build.ensure(RECIPES[1]), seconds=20) is True
        assert forked.done(lambda: build.ensure(RECIPES[1]), seconds=20) is False
    assert build.ensure(RECIPES[0]) is False and build.ensure(RECIPES[1]) is False


def test_while_a_thread_holds_other_locks_of_tkq():
    for lock in (dispatch._one_at_a_time, replay._one_at_a_time):
        def hold(stay, lock=lock):
            with lock:
                stay()

        def take(lock=lock):
            with lock:
                return True

        with Busy(hold):
            assert forked.done(take, seconds=10)


FIRST = """
import threading, time
from tests.helpers.process import forked
from tests.helpers.process.kernels_for_tests import Scale
from tkq.runtime import Recipe; from tkq.runtime.compile import build
recipe = Recipe("tests.helpers.process.kernels_for_tests:build_scale", (Scale(),))
thread = threading.Thread(target=build.compile_recipe, args=(recipe,))
thread.start()
children = []
for pause in %s:
    time.sleep(pause)
    children.append(forked.start(lambda: build.compile_recipe(recipe) is None))
thread.join()
assert not any(forked.ended(*child) for child in children)
"""


@pytest.mark.parametrize("pauses", [(0.02, 0.1), pytest.param((0.0, *[0.05] * 9), marks=pytest.mark.slow)])
def test_while_the_dsl_compiles_its_first_kernel(pauses):
    """It imports modules then: a child forked meanwhile would wait for ever for their locks."""
    done = fresh.run(FIRST % (pauses,), timeout=90)
    assert done.returncode == 0, done.stderr


def test_a_fork_waits_for_a_lock_only_so_long():
    lock = forks.Renewed(threading.RLock, wait=0.3)

    def work(stay):
        with lock:
            stay()

    with Busy(work):
        began = time.monotonic()
        child = forked.start(lambda: lock.__enter__())
        assert 0.2 < time.monotonic() - began < 10
        assert forked.ended(*child) is None
    with lock:  # its own holder does not wait, and has it as before
        assert forked.ended(*forked.start(lambda: lock.__enter__())) is None
    with Busy(work):
        pass


def holding(folder, name="a"):
    with Cache(folder, before=()).lock(name):
        return True


def test_a_child_has_no_lock_of_its_parent(tmp_path):
    with Cache(tmp_path, before=()).lock("a"):
        assert not forked.done(lambda: [number for number in range(3, 200) if is_lock(number)])
        assert [number for number in range(3, 200) if is_lock(number)]
    assert not [number for number in range(3, 200) if is_lock(number)]


def is_lock(number):
    try:
        return ".tkq-lock-" in os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        return False


def test_programs_that_are_started_have_none(tmp_path):
    program = ("import os; print(*(os.readlink(p) for p in map('/proc/self/fd/{}'.format, range(200)) "
               "if os.path.exists(p)))")
    with Cache(tmp_path, before=()).lock("a"):
        listed = subprocess.run([sys.executable, "-c", program], close_fds=False, capture_output=True, text=True).stdout
    assert listed and "lock" not in listed


HOLDER = """
import os, pathlib, sys, threading, time
from tkq.runtime.compile.cache import Cache

def child():
    os.write(1, f"{os.fork() or os.getpid()}\\n".encode())
    time.sleep(60)

with Cache(pathlib.Path(sys.argv[1]), before=()).lock("a"):
    if sys.argv[2] == "inside":
        child()
    thread = threading.Thread(target=child)
    thread.start()
    thread.join()
"""


@pytest.mark.parametrize("when", ("before", "inside"))
def test_a_holder_that_is_killed_while_its_child_lives(tmp_path, when):
    """The child was forked while the lock was held, by another thread or by the holder itself: a program of its own,
    as other libraries' threads in this process may hold up a fork of a fork."""
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path), when], stdout=subprocess.PIPE)
    said = [pid_of(holder), pid_of(holder)]  # from the holder, which has the lock then, and from its child
    holder.kill()
    holder.wait()
    child, = set(said) - {holder.pid}
    try:
        assert os.path.exists(f"/proc/{child}")
        assert forked.done(lambda: holding(tmp_path), seconds=10)
    finally:
        os.kill(child, signal.SIGKILL)
        holder.stdout.close()


def pid_of(program, seconds=60):
    """The next number that it writes."""
    said = b""
    while not said.endswith(b"\n"):
        assert select.select([program.stdout], [], [], seconds)[0], f"nothing said in {seconds} s"
        part = os.read(program.stdout.fileno(), 1)
        assert part, f"it has ended, and said {said}"
        said += part
    return int(said)


def test_a_fork_inside_leaves_the_parents_lock_alone(tmp_path):
    store = Cache(tmp_path, before=())
    with store.lock("a"):
        def leave():
            # as if the child went on to the end of the parent's block
            for number in list(locks._descriptors._numbers):
                locks._let_go(number)
            return [mine for mine in locks._held.names if mine[1] == os.getpid()]

        assert forked.done(leave) == []
        process, reading = forked.start(lambda: holding(tmp_path))
        time.sleep(0.3)
        assert os.waitpid(process, os.WNOHANG) == (0, 0)  # still waits
    assert forked.ended(process, reading)


def test_a_waiting_process_goes_on_in_the_end(tmp_path, monkeypatch, caplog):
    """The holder has been stopped, say."""
    monkeypatch.setattr(locks, "PATIENCE", 0.05)
    monkeypatch.setattr(locks, "LONGEST", 0.2)
    with Busy(lambda stay: held_by(tmp_path, stay)):
        assert holding(tmp_path)
    assert "waits for another process" in caplog.text and "waits no longer" in caplog.text


def held_by(folder, stay):
    with Cache(folder, before=()).lock("a"):
        stay()


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def none(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(locks.fcntl, "flock", none)
    assert holding(tmp_path)


def test_the_private_folder_is_each_processs_own():
    mine = private_folder()
    his = forked.done(lambda: str(private_folder()))
    assert his != str(mine) and mine.is_dir()
    program = "\n".join((
        "import os, sys", "from tkq.runtime.compile.cache import private_folder", "mine = private_folder()",
        "process = os.fork()",
        "if process == 0: sys.exit(0)  # with all that is done at a program's end",
        "os.waitpid(process, 0)", "assert mine.is_dir()", "os.rmdir(mine)", "assert private_folder().is_dir()",
        "print(private_folder())"))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not os.path.exists(done.stdout.strip())
