"""Many processes and threads on an empty cache, one of them killed at work: each entry is made once."""
import collections
import os
import pathlib
import signal
import subprocess
import sys
import time

from tkq.runtime.compile.cache import Cache

CHECKOUT = pathlib.Path(__file__).resolve().parents[4]
ENTRIES, PROCESSES, THREADS = 5, 4, 8
# What compiles is replaced by something quick that takes notes: what is served, and when, is decided around it.
PROCESS = f"""
import os, sys, threading, time
from tkq.runtime import Recipe, ensure; from tkq.runtime.compile import build

log = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)
def noted(*words):
    os.write(log, (" ".join(map(str, (os.getpid(), *words))) + "\\n").encode())

def built(recipe, store, name, arch):
    noted("begins", recipe.args[0])
    time.sleep(0.05 if os.path.exists(sys.argv[1] + ".killed") else 30)  # the first one is killed in it
    noted("ends", recipe.args[0])
    return name.encode(), dict(kind="static", symbol=name)

build._built = built
recipes = [Recipe("tests.helpers.process.kernels_for_tests:build_scale", (number,)) for number in range({ENTRIES})]
errors = []
def ask(first):
    try:
        for i in range({ENTRIES}):
            ensure(recipes[(first + i) % {ENTRIES}])
    except Exception as error:
        errors.append(error)
        raise
threads = [threading.Thread(target=ask, args=(first,)) for first in range({THREADS})]
[thread.start() for thread in threads], [thread.join() for thread in threads]
sys.exit(len(errors))
"""


def test_each_entry_is_made_once_though_one_is_killed_at_it(tmp_path):
    log, folder = tmp_path / "log", tmp_path / "cache"
    log.write_text("")
    processes = [subprocess.Popen([sys.executable, "-c", PROCESS, str(log)], cwd=CHECKOUT, text=True,
                                  env={**os.environ, "TKQ_CACHE_DIR": str(folder)}) for _ in range(PROCESSES)]
    try:
        while len(begun := noted(log, "begins")) < 1:
            assert any(process.poll() is None for process in processes), "all ended before one began"
            time.sleep(0.02)
        (tmp_path / "log.killed").write_text("")
        victim = begun[0][0]  # others may be at work already, on other entries: they are slow as well, and are killed
        killed = {process for process, _ in noted(log, "begins")}
        for process in processes:
            if process.pid in killed:
                process.send_signal(signal.SIGKILL)
        codes = {process.pid: process.wait(60) for process in processes}
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert victim in killed and len(killed) < PROCESSES
    assert all(code == (-signal.SIGKILL if pid in killed else 0) for pid, code in codes.items())
    made = collections.Counter(entry for _, entry in noted(log, "ends"))
    assert made == {str(number): 1 for number in range(ENTRIES)}
    cache = Cache(folder)
    assert len(cache.entries()) == ENTRIES and all(cache.find(path.name) for path in cache.entries())
    assert not list(folder.glob(".new-*"))


def noted(log, what):
    lines = [line.split() for line in log.read_text().splitlines()]
    return [(int(pid), entry) for pid, word, entry in lines if word == what]


NATIVE = """
import os, sys, time
from tkq.runtime.compile import native

log, compiled = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND), native._compiled

def noted(kind):
    os.write(log, f"{kind}\\n".encode())
    time.sleep(0.2)
    return b"object"

native._compiled = noted
assert native.library("again").object() == b"object"
"""


def test_functions_in_c_are_compiled_by_one_process(tmp_path):
    """None replaces a file that another process may have loaded."""
    log = tmp_path / "log"
    log.write_text("")
    processes = [subprocess.Popen([sys.executable, "-c", NATIVE, str(log)], cwd=CHECKOUT,
                                  env={**os.environ, "TKQ_CACHE_DIR": str(tmp_path / "cache"), "TKQ_BUNDLE": ""})
                 for _ in range(4)]
    assert [process.wait(60) for process in processes] == [0] * 4
    assert log.read_text().split() == ["again"]
