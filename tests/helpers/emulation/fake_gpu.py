"""CPU tensors that pose as a GPU's, and kernels that are notes: what a call would launch, where there is no GPU."""
import contextlib
import functools
import importlib
import pkgutil
import sys

import pytest
import torch

import tkq
from tkq.runtime.call import counters
from tkq.runtime.compile import build
from tkq.runtime.device import arch, clusters

_TABLES = ("_launch_cache", "_seen", "_launchers", "_calls", "_kernels")


@contextlib.contextmanager
def launches():
    """[(recipe, arguments)] of what is launched meanwhile. A kernel writes nothing."""
    seen = []

    def function(recipe):
        return lambda *args: seen.append((recipe, args))

    with pytest.MonkeyPatch.context() as patched:
        for name, value in (("require_hopper", lambda device: None), ("num_sms", lambda device: 132),
                            ("_index", lambda device: 0), ("model", lambda device: "a GPU")):
            patched.setattr(arch, name, value)
        patched.setattr(clusters, "resident", lambda *args: 132)
        scratch = torch.zeros(4096, dtype=torch.int32)
        patched.setattr(counters, "counter", lambda index: scratch[:1])
        patched.setattr(counters, "with_scratch", lambda index, size: scratch[:size])
        _import_ops()  # or one would find the notes and keep them
        real = build.function
        for name, module in list(sys.modules.items()):
            if name.startswith("tkq"):
                if getattr(module, "function", None) is real:
                    patched.setattr(module, "function", function)
                for table in _TABLES:
                    if isinstance(getattr(module, table, None), dict):
                        patched.setattr(module, table, type(getattr(module, table))())
        _forget()
        patched.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
        try:
            yield seen
        finally:
            _forget()


def seen_by(*calls) -> list:
    """What calls launch one after the other: [(recipe, arguments, of tensors what a kernel can be chosen by)]."""
    with launches() as seen:
        for call in calls:
            call()
    return [(recipe, _layouts(args)) for recipe, args in seen]


def apart(*calls) -> bool:
    """Does each of the calls launch what it does where none came before it? Kernels that are remembered by less than
    they were chosen by would serve another call. Each comes twice, and next to each other one."""
    alone = [seen_by(call) for call in calls]
    order = [i for n in range(len(calls)) for i in (0, n, n)]
    return seen_by(*(calls[i] for i in order)) == [one for i in order for one in alone[i]]


def _layouts(x):
    if isinstance(x, tuple):
        return tuple(map(_layouts, x))
    return (x.dtype, tuple(x.shape), x.stride()) if isinstance(x, torch.Tensor) else x


@functools.cache
def _import_ops():
    for module in pkgutil.walk_packages(tkq.__path__, "tkq."):
        if module.name.endswith("ops"):
            importlib.import_module(module.name)


def _forget():
    from tkq.gemm.dense import launch
    from tkq.gemm.fp8 import ops
    from tkq.gemm.grouped import ops as grouped_ops
    from tkq.quantize import ops as quantize

    launch.clear()
    for cached in (ops._launcher, grouped_ops._launcher, quantize._runs):
        cached.cache_clear()
