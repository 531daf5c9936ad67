"""A machine without the DSL, cuda-python and a compiler, for a process or a test run: `python -m pytest -p
tests.helpers.process.without_dsl
...`, or import it first. Nothing is imported from where these lie, nor known of them."""
import importlib.machinery
import os
import sys

PACKAGES = ("cutlass", "nvidia_cutlass_dsl", "cuda")
_DISTRIBUTIONS = ("nvidia-cutlass-dsl", "cuda-python", "cuda-bindings", "cuda-core")
_Path = importlib.machinery.PathFinder


class _Finder:
    """As Python's own, blind to those packages."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name.partition(".")[0] in PACKAGES else _Path.find_spec(name, path, target)

    @staticmethod
    def find_distributions(*context):
        asked = context[0].name if context else None  # then nothing is read: a first call asks for some names
        return (found for found in _Path.find_distributions(*context)
                if not (asked or found.metadata["Name"]).replace("_", "-").startswith(_DISTRIBUTIONS))

    @staticmethod
    def invalidate_caches():
        _Path.invalidate_caches()


if "cutlass" in sys.modules:
    raise ImportError("without_dsl: the DSL was imported before")
for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:  # a .pth file's doing
    del sys.modules[name]
sys.meta_path[:] = [_Finder if finder is _Path else finder for finder in sys.meta_path]
os.environ["PATH"] = ""  # no compiler
