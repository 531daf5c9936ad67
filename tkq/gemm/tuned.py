"""What ``tkq.tune`` found for a product: asked by the host functions before they plan, once for each kind of call. And
what it needs to know to find it."""
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from ..runtime.compile import tuned
from ..runtime.device import arch
from .stored import StoredConfigs


class Tunable(NamedTuple):
    """A call to be tuned. configs: which stored ones its kernels take. inputs: tensors, or None, that call(config, out,
    *inputs) takes. result: a tensor laid out as those are that are written, or the user's own. clear(): drop what host
    functions remember of earlier calls. defined(result): the part of a result that is written."""

    problem: tuned.Problem
    configs: StoredConfigs
    inputs: tuple
    result: Tensor
    call: Callable
    clear: Callable
    defined: Callable = lambda result: result


def problem(op: str, spec, sizes: tuple, device) -> tuned.Problem:
    return tuned.Problem(op, spec, tuple(sizes), arch.model(device))


def chosen(configs: StoredConfigs, spec, sizes: tuple, device):
    """The configuration for a problem on this kind of GPU; None where ``tkq.tune`` has not been asked, or what it found
    does not fit today's kernels."""
    if not tuned.anything():
        return None
    query = problem(configs.op, spec, sizes, device)
    return stored(query, tuned.read(query), configs)


def stored(query: tuned.Problem, found: dict | None, configs: StoredConfigs):
    """The configuration in what was read for a problem; None where there is none that its kernels take as it is."""
    if found is None:
        return None
    config = tuned.config(found, query.spec, configs.classes)
    return config if config is not None and configs.fits(config, query.spec, query.sizes[0]) else None
