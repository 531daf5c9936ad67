"""What ``tkq.tune`` found for a product: asked by the host functions before they plan, once for each kind of call. And
what it needs to know to find it."""
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from ..runtime.compile import tuned
from ..runtime.device import arch


class Tunable(NamedTuple):
    """A call to be tuned. candidates: configurations, the plan's first; empty where there is one kernel only. inputs:
    tensors, or None, that call(config, out, *inputs) takes. result: a tensor laid out as those are that are written, or
    the user's own. forget(): what host functions remember of earlier calls. defined(result): the part of a result that
    is written."""

    problem: tuned.Problem
    candidates: list
    inputs: tuple
    result: Tensor
    call: Callable
    clear: Callable
    defined: Callable = lambda result: result


def problem(op: str, spec, sizes: tuple, device) -> tuned.Problem:
    return tuned.Problem(op, spec, tuple(sizes), arch.model(device))


def chosen(op: str, spec, sizes: tuple, device):
    """The configuration for a problem on this kind of GPU; None where ``tkq.tune`` has not been asked, or what it found
    does not fit today's kernels."""
    if not tuned.anything():
        return None
    asked = problem(op, spec, sizes, device)
    return stored(asked, tuned.read(asked))


def stored(asked: tuned.Problem, found: dict | None):
    """The configuration in what was read for a problem; None where there is none that its kernels take as it is."""
    if found is None:
        return None
    from .candidates import CLASSES, fits  # with the first call: the plans of all products

    config = tuned.config(found, asked.spec, CLASSES[asked.op])
    return config if config is not None and fits(asked.op, config, asked.spec, asked.sizes[0]) else None
