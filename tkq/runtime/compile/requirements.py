"""Packages that compile and load kernels: the versions that tkq is tested with, and what is wrong with those here."""
from __future__ import annotations

from . import keys

DSL, FFI, CUDA_PYTHON = "nvidia-cutlass-dsl", "apache-tvm-ffi", "cuda-python"
_TESTED = {DSL: ((4, 8, 0), (4, 9)), FFI: ((0, 1, 11), (0, 2)), CUDA_PYTHON: ((12, 8), (14,))}  # from, and before
_EXTRA = {DSL: "[cu13]"}


def problem(package: str, version: str | None) -> str | None:
    """One line on a package that is missing (version None) or untested, with the command that mends it; None where its
    version is tested."""
    low, high = _TESTED[package]
    command = install(package, _EXTRA.get(package, ""))
    if version is None:
        return f"{package} is missing: {command}."
    if low <= numbers(version) < high:
        return None
    return f"{package} is {version}; tkq is tested with {dotted(low)} up to, not including, {dotted(high)}: {command}."


def why_no_compiling() -> str | None:
    """One line on what is missing for kernels to be compiled here; None where the DSL is installed."""
    return None if keys.version(DSL) else problem(DSL, None)


def install(package: str, extra: str = "") -> str:
    """pip's command for a tested version. extra: of the package, in brackets."""
    low, high = map(dotted, _TESTED[package])
    return f"pip install '{package}{extra}>={low},<{high}'"


def numbers(version: str) -> tuple:
    """(4, 8, 1) of "4.8.1.post2": the leading numbers."""
    found = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        found.append(int(part))
    return tuple(found)


def dotted(version: tuple) -> str:
    return ".".join(map(str, version))
