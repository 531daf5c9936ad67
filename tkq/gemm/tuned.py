"""What ``tkq.tune`` found for a product: asked by the host functions before they plan, once for each kind of call. And
what it needs to know to find it."""
from collections.abc import Callable
from typing import NamedTuple

from ..runtime import arch, tuned


class Tunable(NamedTuple):
    """A call to be tuned. candidates: configurations, the plan's first; empty where there is one kernel only. inputs:
    tensors, or None, that call(config, *inputs) takes. forget(): what host functions remember of earlier calls.
    defined(result): the part of a result that is written."""

    problem: tuned.Problem
    candidates: list
    inputs: tuple
    call: Callable
    forget: Callable
    defined: Callable = lambda result: result


def problem(op: str, spec, sizes: tuple, device) -> tuned.Problem:
    return tuned.Problem(op, spec, tuple(sizes), arch.model(device))


def chosen(op: str, spec, sizes: tuple, device):
    """The configuration for a problem on this kind of GPU; None where ``tkq.tune`` has not been asked, or what it found
    does not fit today's kernels."""
    from .candidates import CLASSES  # with the first call: the plans of all products

    return tuned.config(tuned.read(problem(op, spec, sizes, device)), spec, CLASSES)
