"""tests/helpers/process/no_output.py finds what tkq and the DSL say, and nothing else."""
import contextlib
import logging
import sys
import warnings

import pytest

from tests.helpers.process.no_output import CHECKOUT, no_word
from tkq.runtime.system.locks import _say_that_it_waits


def warned(text):
    warnings.warn(text, stacklevel=1)


@pytest.mark.parametrize("say", [
    lambda: warned("tkq: the cache cannot be written"), lambda: print("CUTLASS says", file=sys.stderr),
    lambda: logging.getLogger("tkq").warning("waiting"),
    lambda: warnings.warn_explicit("a word", UserWarning, f"{CHECKOUT}/tkq/runtime/call/ops.py", 1),
], ids=("warning", "stderr", "log", "file"))
def test_ours_is_found(say, capfd, caplog):
    with pytest.raises(AssertionError), no_word(capfd, caplog):
        say()


def test_others_may_speak(capfd, caplog):
    with no_word(capfd, caplog):
        warned("torch.jit is old")
        print(f"{CHECKOUT}/tests/x.py, elsewhere/tkq-env/x.py: a word", file=sys.stderr)
        logging.getLogger("tkq").info("compiled")


@pytest.mark.parametrize("worker", [True, False])
def test_a_worker_may_say_that_it_waits_for_another(worker, capfd, caplog, monkeypatch):
    """Of workers that begin with an empty cache, one compiled behind the lock that another one wanted. By itself a
    process has none to wait for."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    if worker:
        monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    with contextlib.nullcontext() if worker else pytest.raises(AssertionError), no_word(capfd, caplog):
        _say_that_it_waits("8912, backward_pairs-45ac", "build-723d")
    assert "backward_pairs-45ac" in caplog.text
