"""``python -m tkq doctor``: what is installed here, what works, and what is wrong, in words one can act on."""
from __future__ import annotations

import platform
import sys
import warnings
from dataclasses import dataclass

from ..runtime.compile import bundle, keys, link
from ..runtime.compile.build import cache
from ..runtime.compile.requirements import CUDA_PYTHON, DSL, FFI, dotted, install, numbers, problem
from ..runtime.system import trusted
from ..version import __version__

_OLDEST_TORCH = (2, 9)
_NEEDED_DRIVER = {13: "580", 12: "525"}  # the first driver branch of each CUDA version, on Linux
_HOPPER = (9, 0)


@dataclass(frozen=True)
class Facts:
    """What was found. Versions are strings, None where something is missing; driver and torch_cuda are (major, minor).

    gpu: (name, compute capability) of the current device. linker: why kernels are not linked, None where they are.
    cudart: where the CUDA runtime is that linked kernels need. bundle: the one in use, and how many kernels it has.
    bundle_problem: why the one that is there cannot be used."""

    python: tuple
    torch: str | None
    torch_cuda: tuple | None
    dsl: str | None
    flavours: tuple
    flavour: str | None
    tvm_ffi: str | None
    driver: tuple | None
    gpu: tuple | None
    linker: str | None
    nvdisasm: str | None
    cuda_python: str | None
    cudart: str | None
    bundle: str | None = None
    bundle_problem: str | None = None


@dataclass(frozen=True)
class Finding:
    """broken: tkq cannot be used as it is here. Otherwise something costs time or is not to be had."""

    text: str
    broken: bool = True


def main() -> int:
    """Print facts and findings. 0: usable here, without a GPU too; 1: something is broken."""
    facts = examine()
    for label, value in describe(facts):
        print(f"{label:<14}{value}")
    findings = diagnose(facts) + _cache_findings()
    print()
    for finding in findings:
        print(("PROBLEM: " if finding.broken else "note: ") + finding.text)
    broken = any(finding.broken for finding in findings)
    print("Something is broken: see above." if broken else _verdict(facts))
    return 1 if broken else 0


def examine() -> Facts:
    """Look around, without importing the DSL."""
    from ..testing.sass import nvdisasm

    torch, torch_cuda, gpu = _torch()
    return Facts(python=sys.version_info[:3], torch=torch, torch_cuda=torch_cuda,
                 dsl=keys.version("nvidia-cutlass-dsl"), flavours=keys.flavours(), flavour=keys.flavour(),
                 tvm_ffi=keys.version("apache-tvm-ffi"), driver=keys.driver_cuda(), gpu=gpu, linker=link.why_not(),
                 nvdisasm=nvdisasm(), cuda_python=keys.version("cuda-python") or keys.version("cuda-bindings"),
                 cudart=link.cudart(), **_bundle())


def describe(facts: Facts) -> list[tuple[str, str]]:
    """(label, value) lines."""
    store = cache()
    cuda = f"CUDA {dotted(facts.torch_cuda)}" if facts.torch_cuda else "no CUDA"
    libraries = ", ".join(facts.flavours) or "missing"
    used = f"; {facts.flavour} is used" if facts.flavour else ""
    try:
        held = f"{len(store.entries())} kernels, {store.bytes() / 1e6:.1f} of {store.most_bytes / 1e6:.0f} MB"
    except OSError as error:  # another user's, say: `_cache_findings` has the advice
        held = f"cannot be read ({error.strerror or error})"
    return [
        ("tkq", f"{__version__}, kernels for {keys.TARGET}"),
        ("python", f"{dotted(facts.python)} on {platform.machine()} {platform.system()}"),
        ("torch", f"{facts.torch or 'missing'}, {cuda}"),
        ("DSL", f"nvidia-cutlass-dsl {facts.dsl or 'missing'}, libraries {libraries}{used}"),
        ("tvm-ffi", facts.tvm_ffi or "missing"),
        ("cuda-python", facts.cuda_python or "missing"),
        ("CUDA runtime", facts.cudart or "not found"),
        ("driver", f"for CUDA up to {dotted(facts.driver)}" if facts.driver else "none"),
        ("GPU", f"{facts.gpu[0]}, compute capability {dotted(facts.gpu[1])}" if facts.gpu else "none"),
        ("cache", f"{trusted.shown(store.folder)}: {held}"),
        ("bundle", facts.bundle or "none"),
        ("C compiler", link.compiler() or "none"),
        ("nvdisasm", facts.nvdisasm or "none"),
    ]


def _bundle():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        bundle.current.cache_clear()  # an earlier caller has already seen the warning
        held = bundle.current()
    return dict(bundle=held and f"{held.path}: {len(held.note['kernels'])} kernels",
                bundle_problem=next((str(one.message).removeprefix("tkq: ") for one in said), None))


def diagnose(facts: Facts) -> list[Finding]:
    """What is wrong, and what to do about it."""
    return [*_wrong_packages(facts), *_wrong_device(facts), *_costs(facts)]


def _wrong_packages(facts):
    if facts.python < (3, 10):
        yield Finding(f"Python {dotted(facts.python)} is too old: tkq needs 3.10 or newer.")
    if facts.torch is None:
        yield Finding("PyTorch cannot be imported: pip install torch.")
    elif numbers(facts.torch) < _OLDEST_TORCH:
        yield Finding(f"PyTorch is {facts.torch}; tkq needs {dotted(_OLDEST_TORCH)} or newer: pip install "
                      f"'torch>={dotted(_OLDEST_TORCH)}'.")
    yield from _wrong_version(FFI, facts.tvm_ffi)
    if facts.bundle_problem:
        yield Finding(f"{facts.bundle_problem[0].upper()}{facts.bundle_problem[1:]}")
    if facts.bundle and facts.dsl is None:
        yield Finding("nvidia-cutlass-dsl is missing: kernels that the bundle lacks cannot be compiled here.", False)
        return
    yield from _wrong_version(CUDA_PYTHON, facts.cuda_python)
    yield from _wrong_version(DSL, facts.dsl)
    if facts.dsl is not None and not facts.flavours:
        yield Finding("The DSL's libraries are missing: pip install 'nvidia-cutlass-dsl[cu13]' (or without [cu13], for "
                      "CUDA 12).")


def _wrong_version(package, version):
    text = problem(package, version)
    if text:
        yield Finding(text)


def _wrong_device(facts):
    if facts.torch_cuda and facts.driver is None:
        yield Finding("PyTorch is built for CUDA, but there is no NVIDIA driver: kernels can be compiled, not run. If "
                      "this machine has a GPU, install its driver; a container must be started with the GPU "
                      "(--gpus all).", False)
    if facts.driver and facts.torch_cuda and facts.driver[0] < facts.torch_cuda[0]:
        needed = _NEEDED_DRIVER.get(facts.torch_cuda[0], "a newer one")
        yield Finding(f"The driver is for CUDA up to {dotted(facts.driver)}, PyTorch is built for CUDA "
                      f"{dotted(facts.torch_cuda)}: update the driver (to {needed} or newer), or install a PyTorch "
                      f"for CUDA {facts.driver[0]}.")
    if facts.driver and facts.flavours and facts.flavour is None:
        yield Finding(f"The driver is for CUDA up to {dotted(facts.driver)}, the DSL's libraries are "
                      f"{', '.join(facts.flavours)}: update the driver, or pip install nvidia-cutlass-dsl, which is "
                      "for CUDA 12.")
    if facts.torch_cuda and facts.flavour and facts.torch_cuda[0] != int(facts.flavour[2:]):
        yield Finding(_flavour_mismatch(facts))
    if facts.driver and facts.torch and not facts.torch_cuda:
        yield Finding("There is an NVIDIA driver, but this PyTorch is built without CUDA: tensors stay on the CPU. "
                      "Install a PyTorch for CUDA, as pytorch.org says.", False)
    if facts.driver and facts.torch_cuda and facts.driver[0] >= facts.torch_cuda[0] and facts.gpu is None:
        yield Finding("There is an NVIDIA driver and PyTorch is built for CUDA, but sees no device. See that "
                      "nvidia-smi lists a GPU (after an update of the driver: restart the machine), that "
                      "CUDA_VISIBLE_DEVICES does not hide it, and that a container is started with it (--gpus all).",
                      False)
    if facts.driver and facts.flavour and facts.linker is None and facts.cudart is None:
        package = "nvidia-cuda-runtime" + ("-cu12" if facts.flavour == "cu12" else "")
        yield Finding(f"The CUDA runtime, libcudart.so.{facts.flavour[2:]}, was not found, so that kernels cannot be "
                      f"loaded: install a PyTorch for CUDA {facts.flavour[2:]}, or pip install {package}.")
    if facts.gpu and facts.gpu[1] != _HOPPER:
        age = "older" if facts.gpu[1] < _HOPPER else "newer"
        yield Finding(f"{facts.gpu[0]} has compute capability {dotted(facts.gpu[1])}, {age} than the 9.0 that the "
                      "kernels are made for: they run on Hopper (H100, H200, GH200) only. CPU tensors work.")


def _flavour_mismatch(facts):
    torch = facts.torch_cuda[0]
    start = f"PyTorch is built for CUDA {torch}, but the DSL uses its {facts.flavour} libraries"
    if f"cu{torch}" not in facts.flavours:
        extra = f"[cu{torch}]" if torch > 12 else ""
        return f"{start}; those for CUDA {torch} are missing: {install(DSL, extra)}."
    return (f"{start}, the newest that the driver can run: install a PyTorch for CUDA {facts.flavour[2:]}, or "
            f"pip uninstall nvidia-cutlass-dsl-libs-{facts.flavour}.")


def _costs(facts):
    if facts.linker:
        yield Finding(f"{facts.linker}: kernels work all the same, but a process that finds one in the cache must "
                      "import the DSL (0.5 s, once), and eager calls cost the CPU some microseconds more. Not so with "
                      "a C compiler (apt install gcc, say).", False)
    if facts.nvdisasm is None:
        yield Finding("nvdisasm is missing: `python -m tkq compile --report` and the demo without a GPU show no "
                      "instructions and no spills, and tests of machine code are skipped: pip install "
                      "nvidia-cuda-nvdisasm.", False)


def _cache_findings():
    try:
        with cache().lock("doctor"):
            pass
    except (OSError, RuntimeError) as error:
        return [Finding(f"The cache cannot be used: {error}. Set TKQ_CACHE_DIR to a folder of yours."), *_passed_over()]
    return [*_passed_over()]


def _passed_over():
    for folder in cache().before:
        try:
            trusted.folder(folder)
        except OSError as error:
            yield Finding(f"A folder of TKQ_CACHE_DIR is passed over: {error}.", False)


def _verdict(facts):
    if facts.gpu and facts.gpu[1] == _HOPPER:
        return "All is well: kernels are compiled and run here."
    return ("No GPU that the kernels run on: they can be compiled here and their machine code looked at, but not run. "
            "CPU tensors take the reference path.")


def _torch():
    """(version, CUDA version or None, (name, capability) of the GPU or None)."""
    try:
        import torch
    except (ImportError, OSError):  # OSError: a library of CUDA that it needs is missing
        return None, None, None
    cuda = numbers(torch.version.cuda)[:2] if torch.version.cuda else None
    if not torch.cuda.is_available():
        return torch.__version__, cuda, None
    return torch.__version__, cuda, (torch.cuda.get_device_name(), torch.cuda.get_device_capability())
