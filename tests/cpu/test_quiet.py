"""tests/quiet.py finds what tkq and the DSL say, and nothing else."""
import logging
import sys
import warnings

import pytest

from tests.quiet import CHECKOUT, no_word


def warned(text):
    warnings.warn(text, stacklevel=1)


@pytest.mark.parametrize("say", [
    lambda: warned("tkq: the cache cannot be written"), lambda: print("CUTLASS says", file=sys.stderr),
    lambda: logging.getLogger("tkq").warning("waiting"),
    lambda: warnings.warn_explicit("a word", UserWarning, f"{CHECKOUT}/tkq/runtime/ops.py", 1),
], ids=("warning", "stderr", "log", "file"))
def test_ours_is_found(say, capfd, caplog):
    with pytest.raises(AssertionError), no_word(capfd, caplog):
        say()


def test_others_may_speak(capfd, caplog):
    with no_word(capfd, caplog):
        warned("torch.jit is old")
        print(f"{CHECKOUT}/tests/x.py, elsewhere/tkq-env/x.py: a word", file=sys.stderr)
        logging.getLogger("tkq").info("compiled")
