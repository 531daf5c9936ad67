"""Granularities as callers name them: by the table's names, by torch's members, by old names. Host functions alone: the
table itself, ``tkq.granularity``, is part of kernels."""
import sys
import warnings
from typing import Any

from ...granularity import NAMES, TABLE

RENAMED = {"block": "1x128", "tile": "128x128"}  # old names, for one minor version
_OF_TORCH = {g.scaling_type: g.name for g in TABLE}


def parse(where: str, value: Any, names=NAMES, warn: bool = True) -> Any:
    """The name in ``tkq.granularity.TABLE`` that a value stands for: a member of torch's ScalingType, or an old name,
    which warns.

    where: the argument, as messages name it ("quantize_fp8: granularity"). names: those that it takes; an old name of
    another comes back as it is. warn: False where torch.compile traces, which cannot warn. What stands for none comes
    back as it is (of a member of ScalingType its name) for the function to refuse: functions differ in the names that
    they allow."""
    if isinstance(value, str):
        new = RENAMED.get(value)
        if new not in names:
            return value
        if warn:
            warnings.warn(f"{where}: {value!r} is now {new!r}; the next minor version drops the old name",
                          DeprecationWarning, stacklevel=_level())
        return new
    if type(value).__name__.endswith("ScalingType"):  # torch 2.10 and later: this module needs no torch to know it
        return _OF_TORCH.get(value.name, value.name)
    return value


def _level() -> int:
    """The stacklevel, of a warning in the function that calls this, of the line outside tkq that the call comes from.
    Code that tkq writes has no module's name."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "tkq").partition(".")[0] == "tkq":
        frame, level = frame.f_back, level + 1
    return level
