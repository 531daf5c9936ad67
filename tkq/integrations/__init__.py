"""tkq under other libraries' signatures."""
import importlib as _importlib

from .. import names as _names
from .scaled_mm import scaled_mm

_MODULES = ("causal_conv1d", "dtensor", "fla", "mamba_ssm", "sdpa", "transformers")

__all__ = ["scaled_mm"]


def __getattr__(name):
    if name in _MODULES:
        return _importlib.import_module(f"{__name__}.{name}")
    raise _names.unknown(__name__, name, (*__all__, *_MODULES))


def __dir__():
    return _names.listed(globals(), (*__all__, *_MODULES))
