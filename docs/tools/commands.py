"""What ``python -m tkq COMMAND --help`` prints, for the page on the command line."""
from __future__ import annotations

import contextlib
import io
import os
import sys
from unittest import mock

from tkq.__main__ import main

COMMANDS = ("compile", "bench")


def helps() -> str:
    """A section each."""
    return "\n\n".join(f"## {name}\n\n```text\n{_help(name)}\n```" for name in COMMANDS)


def _help(name) -> str:
    out, path = io.StringIO(), list(sys.path)
    with mock.patch.dict(os.environ, COLUMNS="100"), mock.patch.object(sys, "argv", ["tkq"]):
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            main([name, "--help"])
    sys.path[:] = path
    return out.getvalue().strip()
