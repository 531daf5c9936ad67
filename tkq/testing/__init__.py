"""What tests, the demo and the bench share, and helpers for people who write kernels on tkq.

    from tkq.testing import Expectation, assert_2x, assert_sass, pressure

    assert_2x(ours, truth, same_precision)          # numerics: at most twice PyTorch's error, in each block of rows
    assert_sass(recipe, Expectation(registers=64))  # machine code: no spills, registers, instructions; needs no GPU
    pressure(naps={"consumer": 1000}, poison=True)  # races: delays and spoilt stages in all kernels of the process

Modules: ``rule``, ``sass``, ``naps``, ``timing``. ``Expectation`` and ``sass`` need neither torch nor the DSL.
"""
import importlib as _importlib

from .. import names as _names
from ..runtime.compile.expectation import Expectation

_PUBLIC = {
    "Errors": "rule",
    "assert_2x": "rule",
    "errors": "rule",
    "pressure": "naps",
    "KernelReport": "sass",
    "assert_sass": "sass",
    "expect": "sass",
    "report": "sass",
}
_MODULES = ("console", "elf", "rule", "sass", "timing")

__all__ = sorted((*_PUBLIC, "Expectation"))


def __getattr__(name):
    if name in _PUBLIC:
        return getattr(_importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    if name in _MODULES:
        return _importlib.import_module(f"{__name__}.{name}")
    raise _names.unknown(__name__, name, (*__all__, *_MODULES))


def __dir__():
    return _names.listed(globals(), (*__all__, *_MODULES))
