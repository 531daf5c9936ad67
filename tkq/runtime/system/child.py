"""Processes of Python that find modules where this one does, whatever has put them into ``sys.path``."""
from __future__ import annotations

import json
import os
import pathlib
import sys

_PROGRAM = ("import json, runpy, sys; path, name = map(sys.argv.pop, (1, 1)); sys.path[:] = json.loads(path); "
            "runpy.run_module(name, run_name='__main__', alter_sys=True)")


def command(module: str, *words: str) -> list:
    """As ``python -m module words``."""
    here = os.fspath(pathlib.Path(__file__).resolve().parents[3])  # wherever tkq was found
    path = [*dict.fromkeys([*(os.path.abspath(place) for place in sys.path), here])]
    return [sys.executable, "-c", _PROGRAM, json.dumps(path), module, *words]
