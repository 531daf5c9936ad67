"""What a kernel's stand-in is given: tensors of tvm-ffi, whose oldest supported version has no ``data_ptr``.

A stand-in borrows its tensors for the call, and DLPack of a borrowed one ends the process in every version. A function
in C reads the address, as a kernel does.
"""
import atexit
import functools
import pathlib
import subprocess
import tempfile

import torch
import tvm_ffi

from tkq.runtime.compile import link

_SOURCE = """
#include <tvm/ffi/c_api.h>

__attribute__((visibility("default")))
int __tvm_ffi_address(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result) {
    (void)self;
    if (count != 1 || (args->type_index != kTVMFFIDLTensorPtr && args->type_index != kTVMFFITensor)) {
        TVMFFIErrorSetRaisedFromCStr("TypeError", "address: one tensor is allowed");
        return -1;
    }
    const char *held = args->v_ptr;
    const DLTensor *t = (const DLTensor *)(args->type_index == kTVMFFITensor ? held + sizeof(TVMFFIObject) : held);
    result->type_index = kTVMFFIInt;
    result->zero_padding = 0;
    result->v_int64 = (int64_t)((char *)t->data + t->byte_offset);
    return 0;
}
"""


def is_tensor(given) -> bool:
    """A tensor of tvm-ffi or of torch."""
    return isinstance(given, (tvm_ffi.Tensor, torch.Tensor))


def address(tensor) -> int:
    """Of its first element. Takes a C compiler for a tensor of tvm-ffi."""
    return _in_c()["address"](tensor) if isinstance(tensor, tvm_ffi.Tensor) else tensor.data_ptr()


@functools.cache
def _in_c():
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)  # until then tvm-ffi may read the library again, for the trace of an error
    source, library = pathlib.Path(folder.name, "address.c"), pathlib.Path(folder.name, "address.so")
    source.write_text(_SOURCE)
    subprocess.run([link.compiler(), "-shared", "-fPIC", "-o", library, source,
                    *(f"-I{path}" for path in tvm_ffi.libinfo.include_paths())], check=True, timeout=60)
    return tvm_ffi.load_module(str(library))
