"""What is tested is what is planned, whatever tkq.tune once found on this machine."""
import pytest

from tkq.runtime import ignore_tuned


@pytest.fixture(autouse=True)
def as_planned():
    ignore_tuned()
    yield
    ignore_tuned(False)
