"""python -m tests.helpers.lint: the contracts of imports in pyproject.toml, by import-linter."""
import sys

from importlinter.cli import lint_imports

sys.exit(lint_imports(no_cache=True, no_logo=True))
