"""The kind of an argument, of the table of arguments: it says what may stand in the argument's place."""
import torch

from tkq.runtime import arguments

_KINDS = {"integer": "number", "choice": "word", "function": "word"}  # by the names in ``odd.REPLACED``


def kind_of(name, argument, value, replaced=False):
    """"tensor", a name in ``odd.REPLACED``, or None: nothing odd is known.

    replaced: value is the odd one, which says nothing of the kind."""
    kind = next(a.kind for a in arguments.table(name) if a.name == argument)
    if kind == "tensor" or (isinstance(value, torch.Tensor) and not replaced):
        return "tensor"
    return None if kind == "other" else _KINDS.get(kind, kind)
