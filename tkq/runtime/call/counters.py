"""Counters in global memory: a kernel hands out work by one and leaves it at zero, or as `workspace` says.

They are found by a stream's handle. A program that destroys a stream of its own (torch.cuda.ExternalStream) while calls
on it are under way, and makes another that gets the same handle, would have two kernels draw from one: wait for the
calls.
"""
import ctypes
import itertools

import torch

from ..device import arch, driver

_of_stream: dict = {}  # (device index, stream) -> counter; grows with the streams that a process uses
_scratch: dict = {}  # (device index, stream, size) -> counter and scratch memory; likewise
_workspaces: dict = {}  # likewise; sizes are powers of two
_of_graphs: dict = {}  # device index -> (counters for captured calls, how many have been handed out)
CAPTURED_CALLS = 16384


def counter(index: int) -> torch.Tensor:
    """An int32 tensor of one zero on CUDA device ``index``, for kernels that put it back to zero when they end.

    Kernels on one stream follow each other and may share a counter; kernels on two streams may not, so there is one for
    each device and stream. A call that is being captured gets one of its own, for good: its graph may be replayed
    beside eager work on this stream, or beside another graph, and both would draw from one counter. Those come from a
    store that is zeroed outside of captures, so that a graph holds no memset; where there is none yet, or none
    left, the zeroing is captured too.
    """
    if index < 0:  # on no GPU: a dry run, which launches nothing
        return torch.empty(1, dtype=torch.int32, device=arch.device(index))
    stream = torch._C._cuda_getCurrentRawStream(index)
    if stream and _capturing(index):  # what is captured is never the default stream, 0
        store, handed_out = _of_graphs.get(index, (None, None))
        i = CAPTURED_CALLS if store is None else next(handed_out)
        return store[i:i + 1] if i < CAPTURED_CALLS else _zeros(1, index)
    found = _of_stream.get((index, stream))
    if found is None:
        if index not in _of_graphs:
            store = _persistent_zeros(CAPTURED_CALLS, index)
            torch.cuda.synchronize(index)  # once: a capture, on whatever stream, may come next
            _of_graphs[index] = store, itertools.count()
        found = _of_stream[index, stream] = _persistent_zeros(1, index)
    return found


def with_scratch(index: int, size: int) -> torch.Tensor:
    """An int32 tensor of which the first element is a counter as above; the others are the launch's, to write and read.

    A call that is being captured gets a new one, its zeroing captured too.
    """
    return _per_stream(_scratch, index, size)


def workspace(index: int, size: int) -> torch.Tensor:
    """As ``with_scratch``, of ``size`` elements or more, all of which are zero at first; later they are as the launch
    before left them, on purpose: only kernels that agree on that share it. Of a device and stream there is one of each
    power of two that was asked for."""
    return _per_stream(_workspaces, index, 1 << (size - 1).bit_length())


def _per_stream(tensors, index, size):
    if index < 0:  # as above
        return torch.empty(size, dtype=torch.int32, device=arch.device(index))
    stream = torch._C._cuda_getCurrentRawStream(index)
    if stream and _capturing(index):
        return _zeros(size, index)
    found = tensors.get((index, stream, size))
    if found is None:
        found = tensors[index, stream, size] = _persistent_zeros(size, index)
    return found


def _zeros(n, index):
    return torch.zeros(n, dtype=torch.int32, device=torch.device("cuda", index))


class _Memory:
    """int32 zeros past torch's allocator, for as long as the process lives: torch.compile's CUDA graphs
    (mode="reduce-overhead") let calls allocate in a pool of theirs, and refuse what stays there."""

    def __init__(self, n, index):
        address, size = ctypes.c_uint64(), ctypes.c_size_t(4 * n)
        with driver.context(index):
            if driver.library().cuMemAlloc_v2(ctypes.byref(address), size):
                torch.cuda.empty_cache()  # what torch keeps for later may be what is missing
                driver.ask("cuMemAlloc_v2", ctypes.byref(address), size)
            stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(index))
            driver.ask("cuMemsetD32Async", address, ctypes.c_uint32(0), ctypes.c_size_t(n), stream)
        self.__cuda_array_interface__ = dict(shape=(n,), typestr="<i4", data=(address.value, False), version=3)


def _persistent_zeros(n, index):
    """Zero for what comes on the current stream of the device."""
    with torch.cuda.device(index):
        return torch.as_tensor(_Memory(n, index), device=torch.device("cuda", index))


# torch's own functions, without what they do around them: they are asked at every call
_current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
_current_captures = getattr(torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing)


def _capturing(index: int) -> bool:
    # asked of the device's own stream: the current device may be another one
    if index == _current_device():
        return _current_captures()
    with torch.cuda.device(index):
        return _current_captures()


_RENAMED = {"kept": "workspace", "room": "with_scratch"}  # old names, for one minor version


def __getattr__(name):
    if name in _RENAMED:
        import warnings  # with the first old name

        warnings.warn(f"counters.{name} is now counters.{_RENAMED[name]}; the next minor version drops the old name",
                      DeprecationWarning, stacklevel=2)
        return globals()[_RENAMED[name]]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
