"""tvm-ffi, which calls the kernels, imported so that a process may still fork and use CUDA in its children.

As it is imported, tvm-ffi gives an older PyTorch two protocols, and asks for its devices first. That starts CUDA: a
fifth of a second or more, after which no process forked from this one can use a GPU. A PyTorch that has both (2.10 and
later) loses nothing where tvm-ffi leaves that out.

tvm-ffi learns this from a variable of its own, which is set during its import alone and not where a user has set it. A
process that another thread starts meanwhile inherits it. A program that imports tvm-ffi or the DSL before tkq keeps
what that did.
"""
import os
import sys

import torch

_LEAVE_OUT = "TVM_FFI_DISABLE_TORCH_C_DLPACK"  # tvm-ffi reads it once, as it is imported


def _has_both() -> bool:
    return hasattr(torch.Tensor, "__dlpack_c_exchange_api__") and hasattr(torch.cuda.Stream, "__cuda_stream__")


def _imported():
    said = _LEAVE_OUT in os.environ or "tvm_ffi" in sys.modules
    if not said and _has_both():
        os.environ[_LEAVE_OUT] = "1"
    try:
        import tvm_ffi
    finally:
        if not said:
            os.environ.pop(_LEAVE_OUT, None)
    return tvm_ffi


tvm_ffi = _imported()
