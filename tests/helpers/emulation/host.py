"""Kernels whose threads host code calls, one after the other: compiled for a CPU."""
import os
import tempfile

import cutlass.cute as cute


def compiled(kernel, args):
    """The kernel as a function that takes tensors of the CPU. args: as a builder declares them.

    Written to a file and loaded again, as tkq does with a GPU's kernels. What ``cute.compile`` returns ready to be
    called has been compiled by two engines of the DSL, of which it keeps one: a sixth of the time."""
    made = cute.compile(kernel, *args, options="--enable-tvm-ffi", no_jit_engine=True)
    with tempfile.TemporaryDirectory(prefix="tkq-on-cpu-") as folder:
        path = os.path.join(folder, "kernel.o")
        made.export_to_c(path, function_name="on_cpu")
        return cute.runtime.load_module(path, enable_tvm_ffi=True).on_cpu
