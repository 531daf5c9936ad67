"""From a recipe to a function: compiled once, however many ask, and never again while nothing changes."""
import json
import math
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import warnings

import pytest
import torch

from tests.helpers.process import fresh
from tests.helpers.process.kernels_for_tests import Scale
from tkq.runtime import Recipe, cache, configure, ensure, function
from tkq.runtime import compile_recipe as compile_afresh
from tkq.runtime.compile import build, keys, launches, link, sources

CHECKOUT = pathlib.Path(__file__).resolve().parents[3]
KERNELS = "tests.helpers.process.kernels_for_tests"
# Prints one JSON line: what the process saw. Arguments: the spec's log file; a second one: torch comes last.
PROCESS = f"""
import json, sys, time
if len(sys.argv) == 2:
    import torch, tkq
from tkq.runtime import Recipe, function; from tkq.runtime.compile import build
# The spec as the other processes have it, without its module, which imports the DSL.
class Scale:
    def __repr__(self): return "Scale(dtype='fp32', factor=2.0, log=" + repr(sys.argv[1]) + ")"
    dtype, factor, log = "fp32", 2.0, sys.argv[1]
recipe = Recipe("{KERNELS}:build_scale", (Scale(),))
if len(sys.argv) > 2:
    assert "torch" not in sys.modules
    build.compile_recipe(recipe)
    function(recipe)
    import torch
x, y = torch.arange(5.0), torch.full((5,), float("nan"))
from tkq.runtime.compile import ffi  # brings tvm_ffi, whose own import takes as long as its version has it
began = time.process_time()
function(recipe)(x, y)
seconds = time.process_time() - began
print(json.dumps(dict(y=y.tolist(), seconds=seconds, dsl="cutlass" in sys.modules)))
"""


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path, monkeypatch):
    """An empty cache, in memory and on disk."""
    monkeypatch.setattr(build, "_functions", {})
    monkeypatch.setattr(build, "_cache", None)
    monkeypatch.setenv("TKQ_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def recipe(tmp_path):
    return Recipe(f"{KERNELS}:build_scale", (Scale(log=str(tmp_path / "log")),))


def compiles(recipe):
    log = pathlib.Path(recipe.args[0].log)
    return len(log.read_text().splitlines()) if log.exists() else 0


def result(f, n=5):
    x, y = torch.arange(float(n)), torch.full((n,), math.nan)
    f(x, y)
    return y.tolist()


def start(recipe, *more):
    return subprocess.Popen([sys.executable, "-c", PROCESS, recipe.args[0].log, *more], cwd=CHECKOUT,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process):
    out, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    return json.loads(out)


def forked(recipe):
    """What `finish(start(recipe))` has, of a process that had PyTorch before."""
    done = fresh.run(PROCESS, recipe.args[0].log)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def forget_memory(monkeypatch):
    monkeypatch.setattr(build, "_functions", {})


def test_compiled_once_then_from_memory(recipe, monkeypatch):
    f = function(recipe)
    assert result(f) == [0, 2, 4, 6, 8] and result(f, 0) == []
    assert function(Recipe(recipe.builder, (Scale(log=recipe.args[0].log),))) is f  # an equal recipe
    forget_memory(monkeypatch)
    g = function(recipe)
    assert g is not f and result(g) == [0, 2, 4, 6, 8]
    assert compiles(recipe) == 1
    assert len(cache().entries()) == 1


def test_ensure_fills_the_disk_cache(recipe):
    assert ensure(recipe) is True
    assert ensure(recipe) is False
    assert build._functions == {} and compiles(recipe) == 1
    note = build.entry_of(recipe).note
    assert note["args"] == repr(recipe.args) and note["arch"] == "sm_90a" and note["seconds"] > 0


def test_of_processes_started_at_once_one_compiles_and_later_ones_are_quick_without_the_dsl(recipe):
    if link.why_not():
        pytest.skip(link.why_not())
    first = [finish(process) for process in [start(recipe) for _ in range(2)]]  # test_cache_at_once has more
    assert any(seen["dsl"] for seen in first) and all(seen["y"] == [0, 2, 4, 6, 8] for seen in first)
    assert compiles(recipe) == 1
    later = [forked(recipe)]
    while later[-1]["seconds"] > 0.040 and len(later) < 3:
        later.append(forked(recipe))
    assert compiles(recipe) == 1
    assert all(seen["y"] == [0, 2, 4, 6, 8] and not seen["dsl"] for seen in later)
    # Of the processor's time, whatever else runs: the best of three at most. bench/studies/cold_start.py has what
    # passes.
    assert min(seen["seconds"] for seen in later) <= 0.040


def test_torch_may_come_last(recipe):
    """It has not been imported where a kernel is compiled and loaded."""
    seen = finish(start(recipe, "torch comes last"))
    assert seen["y"] == [0, 2, 4, 6, 8] and seen["dsl"] and compiles(recipe) == 2


def test_threads_compile_each_kernel_once(recipe):
    other = Recipe(recipe.builder, (Scale(factor=3.0, log=recipe.args[0].log),))
    found, barrier = [], threading.Barrier(6)

    def ask(which):
        barrier.wait()
        found.append((which, function(which)))

    threads = [threading.Thread(target=ask, args=(which,)) for which in (recipe, other) * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(found) == 6 and compiles(recipe) == 2
    assert len({id(f) for which, f in found if which == recipe}) == 1
    assert result(function(recipe)) == [0, 2, 4, 6, 8] and result(function(other)) == [0, 3, 6, 9, 12]


@pytest.mark.parametrize("keep", (0, 1, 1000, -1))
def test_a_damaged_entry_is_built_again(recipe, monkeypatch, keep):
    path = build.entry_of(recipe).path
    data = path.read_bytes()
    path.write_bytes(data[:keep])
    forget_memory(monkeypatch)
    assert result(function(recipe)) == [0, 2, 4, 6, 8]
    assert compiles(recipe) == 2 and cache().find(path.name) is not None


def test_a_whole_entry_that_does_not_load_is_built_again(recipe):
    entry = build.entry_of(recipe)
    cache().put(entry.path.name, b"\x7fELF, but nothing that a loader takes", entry.note)
    assert result(function(recipe)) == [0, 2, 4, 6, 8]
    assert compiles(recipe) == 2


def test_the_name_of_an_entry_changes_with_what_can_change_the_code(recipe, monkeypatch):
    log = recipe.args[0].log
    named = [
        keys.entry_name(recipe),
        keys.entry_name(recipe, "sm_100a"),
        keys.entry_name(recipe, options="--enable-tvm-ffi --opt-level 2"),
        keys.entry_name(Recipe(recipe.builder, recipe.args, options="--generate-line-info")),
        keys.entry_name(Recipe(recipe.builder, (Scale(dtype="bf16", log=log),))),
        keys.entry_name(Recipe(f"{KERNELS}:build_gpu_scale", recipe.args)),
        keys.entry_name(Recipe(recipe.builder, recipe.args, sources=("tests.helpers.sanitizer.nan_fill",))),
    ]
    monkeypatch.setenv("CUTE_DSL_COMPILER_OPT", "remarks{ptx}")
    named.append(keys.entry_name(recipe))
    monkeypatch.delenv("CUTE_DSL_COMPILER_OPT")
    for part in ("toolchain", "flavour"):
        monkeypatch.setattr(keys, part, lambda: "another")
    named.append(keys.entry_name(recipe))
    monkeypatch.undo()
    assert len(set(named)) == len(named)
    monkeypatch.setenv("CUTE_DSL_DUMP_DIR", "/somewhere")  # where files go changes no code
    assert keys.entry_name(recipe) == named[0]


def test_the_name_changes_with_the_kernels_sources_and_not_with_others(tmp_path):
    shutil.copytree(CHECKOUT / "tkq", tmp_path / "tkq", ignore=shutil.ignore_patterns("__pycache__"))
    program = ("from tkq.runtime import Recipe; from tkq.runtime.compile import keys; "
               "print(keys.entry_name(Recipe('tkq.gemm.dense.kernel:DenseGemm', (1,))))")

    def name(*edited_files):
        for edited in edited_files:
            with open(tmp_path / "tkq" / edited, "a") as file:
                file.write("\nint edited;\n" if edited.endswith(".c") else "\nEDITED = 1\n")
        return subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True,
                              check=True, env={**os.environ, "PYTHONPATH": str(tmp_path)}).stdout

    seen = [name()] + [name(e) for e in ("tile/mma.py", "tile/dtypes.py", "gemm/dense/kernel.py",
                                         "gemm/dense/operands.py",
                                         "pointwise/activations.py", "runtime/compile/build.py",
                                         "runtime/compile/fake.py",
                                         "runtime/compile/link.py", "runtime/compile/shim.c")]
    assert len(set(seen)) == len(seen)
    assert seen[-1] == name("norms/forward/row_norm.py", "attention/forward/kernel.py", "utils.py", "reference.py",
                            "cli/doctor.py")


def test_the_name_changes_with_a_builders_own_source(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_kernels.py").write_text("def build(): ...\n")
    before = keys.entry_name(Recipe("my_kernels:build"))
    (tmp_path / "my_kernels.py").write_text("def build(): pass\n")
    sources.clear()  # a process reads it once
    assert keys.entry_name(Recipe("my_kernels:build")) != before
    with pytest.raises(ImportError, match=r"no_such_kernels: has no source file"):
        keys.entry_name(Recipe("no_such_kernels:build"))


def test_the_memory_table_is_asked_first(recipe, monkeypatch):
    f = function(recipe)
    monkeypatch.setattr(keys, "entry_name", None)  # would raise if called
    assert function(recipe) is f


def test_a_cache_that_cannot_be_written_costs_a_warning(recipe, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    configure(tmp_path / "file" / "cache")
    with pytest.warns(UserWarning, match="TKQ_CACHE_DIR"):
        assert result(function(recipe)) == [0, 2, 4, 6, 8]


def test_configure(tmp_path):
    assert cache().folder == tmp_path / "cache"
    configure(tmp_path / "other", 1000)
    assert cache().folder == tmp_path / "other" and cache().most_bytes == 1000
    configure(most_bytes=2000)
    assert cache().folder == tmp_path / "other" and cache().most_bytes == 2000
    with pytest.raises(ValueError, match="-1"):
        configure(most_bytes=-1)
    for bad in (True, float("nan"), 1e9, "1"):
        with pytest.raises(TypeError, match="most_bytes: got"):
            configure(most_bytes=bad)


def test_without_a_c_compiler_the_object_file_serves(recipe, monkeypatch):
    monkeypatch.setattr(link, "compiler", lambda: None)
    assert result(function(recipe)) == [0, 2, 4, 6, 8]
    assert [path.suffix for path in cache().entries()] == [".o"]
    forget_memory(monkeypatch)
    assert result(function(recipe)) == [0, 2, 4, 6, 8] and compiles(recipe) == 1


def test_without_the_static_runtime_the_shared_one_serves(recipe, monkeypatch):
    if link.compiler() is None or not (link.dsl_folder() / "libcute_dsl_runtime.so").is_file():
        pytest.skip("no C compiler, or no libcute_dsl_runtime.so")
    monkeypatch.setattr(link, "runtime_kind", lambda: "shared")
    assert result(function(recipe)) == [0, 2, 4, 6, 8]
    assert build.entry_of(recipe).note["kind"] == "shared"


def test_a_kernel_for_the_gpu_loads_here_and_checks_its_arguments():
    f = function(Recipe(f"{KERNELS}:build_gpu_scale", (Scale(),)))
    x = torch.zeros(3, 128)
    with pytest.raises(ValueError, match="device_type=cuda"):
        f(x, x)
    with pytest.raises(ValueError, match="ndim=2"):
        f(x[0], x)
    with pytest.raises(TypeError, match="2 parameters"):
        f(x)


def test_a_linked_kernel_leaves_open_only_what_is_there_when_it_is_loaded(tmp_path):
    tool = shutil.which("nm")
    if tool is None or link.runtime_kind() != "static" or link.compiler() is None:
        pytest.skip("no nm, no C compiler or no static runtime")
    entry = build.entry_of(Recipe(f"{KERNELS}:build_gpu_scale", (Scale(),)))
    listed = subprocess.run([tool, "-D", "--undefined-only", "--without-symbol-versions", entry.path],
                            capture_output=True, text=True, check=True).stdout
    strong = {line.split()[-1] for line in listed.splitlines() if line.split()[0] == "U"}
    libc = {"abort", "fprintf", "snprintf", "stderr", "strlen", "malloc", "free", "__stack_chk_fail", "__fprintf_chk",
            "__snprintf_chk"}
    assert {s for s in strong - libc if not s.startswith(("cuda", "TVMFFI"))} == set()
    assert b"/nvidia/" not in entry.path.read_bytes() and str(CHECKOUT).encode() not in entry.path.read_bytes()


def test_what_a_kernel_needs_that_the_shim_lacks_comes_from_the_shared_runtime():
    if link.runtime_kind() != "static" or link.compiler() is None:
        pytest.skip("no C compiler or no static runtime")
    data = build.exported(compile_afresh(Recipe(f"{KERNELS}:build_scale", (Scale(),))), "tkq_x")
    assert link.link(data)[1] == "static"
    assert link.link(data + b"\0CuteDSLRT_TVMFFISetRaisedCudaLaunchError\0")[1] == "shared"
    assert link.link(b"not an object file") is None


def test_the_shared_memory_of_launches_is_read_from_the_host_code():
    note = build.entry_of(Recipe(f"{KERNELS}:build_gpu_scale", (Scale(),))).note
    assert list(note["dynamic_smem"].values()) == [0]
    config = "!llvm.ptr, !llvm.struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)>"
    host = f"""llvm.func @f(%arg0: i64) {{
      %1 = llvm.mlir.constant(4096 : i32) : i32
      %2 = llvm.zext %1 : i32 to i64
      %3 = llvm.getelementptr %9[0, 2] : (!llvm.ptr) -> {config}
      llvm.store %2, %3 : i64, !llvm.ptr
      %4 = llvm.getelementptr %8[0, 0] : (!llvm.ptr) -> !llvm.ptr, !llvm.array<1 x ptr>
      llvm.store %9, %4 : !llvm.ptr, !llvm.ptr
      %5 = llvm.load %4 : !llvm.ptr -> !llvm.ptr
      %6 = llvm.mlir.addressof @kernels_k0 : !llvm.ptr
      %7 = llvm.load %6 : !llvm.ptr -> !llvm.ptr
      %10 = llvm.call @_cudaLaunchKernelEx(%5, %7, %11) : (!llvm.ptr, !llvm.ptr, !llvm.ptr) -> i32
    }}"""
    assert launches.of_function(host) == {"k0": 4096}
    assert launches.of_function(host.replace("store %2,", "store %arg0,")) == {"k0": None}  # a call decides


def test_builders_that_fail_say_so(recipe):
    with pytest.raises(TypeError, match="build_nothing: returned 'nothing'"):
        function(Recipe(f"{KERNELS}:build_nothing"))
    with pytest.raises(AttributeError, match="no_such"):
        function(Recipe(f"{KERNELS}:no_such"))
    with pytest.raises(ValueError, match="fp99"):
        function(Recipe(f"{KERNELS}:build_scale", (Scale(dtype="fp99"),)))
    with pytest.raises(ValueError, match="build_in_a_tuple: all tensors are in tuples"):
        function(Recipe(f"{KERNELS}:build_in_a_tuple", (Scale(),)))
    assert cache().entries() == []
    assert result(function(recipe)) == [0, 2, 4, 6, 8]  # and no lock stays behind


class NotADataclass:
    pass


@pytest.mark.parametrize("arguments, error", (
    (("no colon",), ValueError),
    ((":build",), ValueError),
    (("module:",), ValueError),
    (("module:build", [1]), TypeError),
    (("module:build", (NotADataclass(),)), TypeError),
    (("module:build", (), "", "module"), TypeError),
))
def test_recipes_that_are_none(arguments, error):
    with pytest.raises(error, match="Recipe"):
        Recipe(*arguments)


def test_the_fingerprint_is_cheap(tmp_path):
    program = "\n".join((
        "import time; from tkq.runtime.compile import build, digests, sources",
        "began = time.process_time(); folder = build.recall().folder; sources.digest(('tkq.losses.forward',))",
        "print(time.process_time() - began); digests.keep(folder)"))
    seconds = [float(subprocess.run([sys.executable, "-c", program], cwd=CHECKOUT, capture_output=True, text=True,
                                    env={**os.environ, "TKQ_CACHE_DIR": str(tmp_path / "cache")}, check=True).stdout)
               for _ in range(4)]
    assert min(seconds[1:]) < 0.03  # 5 to 8 ms for 20 to 40 files; it is part of a second process's first call


def test_no_warning_in_a_usual_compile(recipe):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        function(recipe)
