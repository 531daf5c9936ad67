"""python -m docs.tools [--write]: docs/support.md, made of the specs and plans."""
from __future__ import annotations

import sys
from pathlib import Path

from . import support

PAGE = Path(__file__).resolve().parents[1] / "support.md"

if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(support.page())
    else:
        print(support.page(), end="")
