"""Kernels whose threads host code calls, one after the other: compiled for a CPU."""
import os
import tempfile

import cutlass.cute as cute
from cutlass.cutlass_dsl import tvm_ffi_provider


def compiled(kernel, args):
    """The kernel as a function that takes tensors of the CPU. args: as a builder declares them.

    Written to a file and loaded again, as tkq does with a GPU's kernels. What ``cute.compile`` returns ready to be
    called has been compiled by two engines of the DSL, of which it keeps one: a sixth of the time. Nor is it
    optimised, as ``export_to_c`` does with what it writes, and names stay as they are: a fifth of what is left."""
    made = cute.compile(kernel, *args, options="--enable-tvm-ffi", no_jit_engine=True)
    written = tvm_ffi_provider._aot_support.export_module_to_bytes(made.ir_module, format="o", opt_level=0,
                                                                   enable_pic=True)
    with tempfile.TemporaryDirectory(prefix="tkq-on-cpu-") as folder:
        path = os.path.join(folder, "kernel.o")
        with open(path, "wb") as file:
            file.write(written)
        return getattr(cute.runtime.load_module(path, enable_tvm_ffi=True), made.function_name)
