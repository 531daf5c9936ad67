"""The CUDA driver by ctypes: a process's first call does not wait until cuda.bindings is imported."""
import contextlib
import ctypes
import functools

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


def ask(name: str, *arguments) -> None:
    """Call a function of the driver. RuntimeError where it fails."""
    error = getattr(library(), name)(*arguments)
    if error:
        raise RuntimeError(f"tkq: the CUDA driver's {name} gave CUresult {error}")


@functools.cache
def library():
    return ctypes.CDLL("libcuda.so.1")


@contextlib.contextmanager
def context(index: int):
    """PyTorch's context of a device, in whatever thread this is: nothing may have bound it yet in autograd's, or a new
    one. What another thread captures meanwhile is not disturbed."""
    device, held, mode = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_int(_RELAXED)
    ask("cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
    ask("cuDevicePrimaryCtxRetain", ctypes.byref(held), device)
    try:
        ask("cuCtxPushCurrent_v2", held)
        ask("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        try:
            yield
        finally:
            ask("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
            ask("cuCtxPopCurrent_v2", ctypes.byref(held))
    finally:
        ask("cuDevicePrimaryCtxRelease_v2", device)
