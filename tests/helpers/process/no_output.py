"""Nothing is said by tkq or the DSL while something works; others may speak."""
import contextlib
import os
import pathlib
import re
import warnings

CHECKOUT = str(pathlib.Path(__file__).resolve().parents[3])  # its name does not count
OURS = re.compile(r"\btkq\b(?!-)|cutlass|\bcute\b|tvm_ffi", re.IGNORECASE)
# of the test run itself, on a cold cache: another worker compiled for long, behind the same one of the cache's locks
WAITS = re.compile(r"\btkq: waits for another process, which compiles \(process and kernel: ")


@contextlib.contextmanager
def no_word(capfd, caplog):
    """capfd, caplog: pytest's fixtures. AssertionError for a warning, a line of stderr or of a log that is tkq's or the
    DSL's, by where it comes from or what it names. A worker may say that it waits for what another one compiles."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield
    said = [f"{w.filename}: {w.category.__name__}: {w.message}" for w in seen]
    said += [f"{r.name}: {r.getMessage()}" for r in caplog.get_records("call") if r.levelname != "INFO"]
    said += capfd.readouterr().err.splitlines()
    said = [line for line in said if OURS.search(line.replace(CHECKOUT, ""))]
    if "PYTEST_XDIST_WORKER" in os.environ:
        said = [line for line in said if not WAITS.search(line)]
    assert not said, "\n".join(said)
