"""Programs as a new interpreter would run them, from processes that have PyTorch already: its import takes two seconds.

`run(program, ...)` runs the program in a fork of a process that has imported torch and nothing of tkq or of the DSL.
`before` is what that process does ahead of that import, as to hide packages; `imports` is all that it has imported,
where that is not torch alone. For what hangs on the interpreter itself (the seed of hashes, what torch's own import
brings, how long a start takes) there is subprocess.
"""
from __future__ import annotations

import atexit
import functools
import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[3]
# Reads a line of JSON for each program, forks, and answers with a line: the status. The program has descriptors, an
# environment, a folder and words of its own, and ends as an interpreter does: waits for its threads, runs what is
# registered with atexit, and has its status.
SERVER = """
import os, sys
{before}
import {imports}

def served():
    import gc, json
    gc.freeze()  # no program's garbage collector looks at what all of them share, and none as often as Python has it
    gc.set_threshold(50_000, 20, 100)
    answers, sys.stdout = os.fdopen(os.dup(1), "w"), open(os.devnull, "w")
    for line in sys.stdin:
        asked = json.loads(line)
        process = os.fork()
        if not process:
            answers = None
            program(asked)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        print(status, file=answers, flush=True)

def program(asked):
    import atexit, io, threading, traceback, types
    status = 1
    try:
        for number, name in enumerate(("/dev/null", asked["out"], asked["error"])):
            given = os.open(name, os.O_RDWR)
            os.dup2(given, number)
            os.close(given)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", errors="backslashreplace")
        os.chdir(asked["cwd"])
        os.environ.clear()
        os.environ.update(asked["env"])
        before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[1:1] = [place for place in before if place and place not in sys.path]
        sys.argv[:] = [asked["name"], *asked["words"]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        if asked["name"] != "-c":
            main.__file__, sys.path[0] = asked["name"], os.path.dirname(asked["name"])
        try:
            exec(compile(asked["program"], asked["name"] if asked["name"] != "-c" else "<string>", "exec"), vars(main))
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
            if not isinstance(end.code, (int, type(None))):
                print(end.code, file=sys.stderr)
        except BaseException:
            traceback.print_exc()
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush(), sys.stderr.flush()
    finally:
        os._exit(status & 255)

served()
"""


def run(program, *words, before="", imports="torch", cwd=ROOT, env=None, timeout=120.0):
    """The program's end, as subprocess.run has it with its output captured as text.

    Args:
        program: the source, or the path of a file of it.
        words: ``sys.argv[1:]``.
        before: of the process from which it is forked: a program that runs ahead of the import of torch.
        imports: what that process has imported.
        cwd: of the program; ``sys.path`` begins with it, or with the file's folder.
        env: its environment; this process's where there is none.

    Raises:
        subprocess.TimeoutExpired: it takes longer than ``timeout`` seconds; it is ended.
    """
    name = str(program) if isinstance(program, os.PathLike) else "-c"
    source = pathlib.Path(program).read_text() if name != "-c" else program
    with tempfile.TemporaryDirectory(prefix="tkq-fresh-") as folder:
        out, error = (pathlib.Path(folder, one) for one in ("out", "error"))
        out.touch(), error.touch()
        asked = dict(program=source, name=name, words=list(map(str, words)), cwd=str(cwd), out=str(out),
                     error=str(error), env=dict(os.environ if env is None else env))
        status = _Server.of(before, imports).status(json.dumps(asked), timeout)
        return subprocess.CompletedProcess([name, *words], status, out.read_text(), error.read_text())


class _Server:
    """The process from which programs are forked. One serves all tests of this process that ask for the same."""

    @staticmethod
    @functools.cache
    def of(before, imports):
        return _Server(before, imports)

    def __init__(self, before, imports):
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER.format(before=before, imports=imports)], cwd=ROOT, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, start_new_session=True)
        atexit.register(self.end)

    def status(self, asked, timeout):
        self.process.stdin.write(asked + "\n")
        self.process.stdin.flush()
        if not select.select([self.process.stdout], [], [], timeout)[0]:
            self.end()
            raise subprocess.TimeoutExpired("a program of tests.helpers.process.fresh", timeout)
        line = self.process.stdout.readline()
        if not line:
            self.end()
            raise RuntimeError("tests.helpers.process.fresh: the process that forks has ended")
        return int(line)

    def end(self):
        """With what it has forked. The next program gets another."""
        _Server.of.cache_clear()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
