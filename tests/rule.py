"""The rule lives in tkq.testing; the name stays here for tests that import it from here."""
from tkq.testing.rule import assert_2x

__all__ = ["assert_2x"]
