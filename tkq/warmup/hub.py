"""tkq as a kernel for the Hugging Face hub: a folder that the `kernels` library loads, from wherever it lies.

    python -m tkq.warmup.hub dist/hub        # or: make hub

    dist/hub/build/torch-cuda/__init__.py    # tkq, under another name, with relative imports
                              layers.py      # modules in the place of transformers'
                              metadata.json  # its name, what it needs
                              tkq/__init__.py  # the same names, where earlier versions of `kernels` look for them
    dist/hub/README.md

`kernels` imports a kernel under a name of its own, several versions of one kernel into one process: nothing in it may
be found by the name tkq, nor may two have one namespace of PyTorch's operators. So imports become relative, and names
of modules and of the namespace in the text the kernel's. What belongs to a command line or to another library is left
out; `tkq.prefetch` and `tkq.models` are for the installed package, as they start processes that import it.
"""
from __future__ import annotations

import argparse
import ast
import hashlib
import io
import json
import pathlib
import re
import shutil
import tokenize

from ..version import __version__

VARIANT = "torch-cuda"
LEFT_OUT = ("__main__.py", "cli", "viz", "warmup/hub.py", "warmup/precompile.py", "warmup/wheel.py")
INTEGRATIONS = ("__init__.py", "along_sequences.py", "dtensor.py", "scaled_mm.py")  # what tkq itself needs of them
_TKQ = pathlib.Path(__file__).resolve().parents[1]
_DEPENDS = ["nvidia-cutlass-dsl", "tvm-ffi"]
# Files in which "tkq" is no module: a folder's name, a logger's, a key of a file's header.
_NOT_MODULES = ("runtime/compile/cache.py", "runtime/system/locks.py", "runtime/compile/bundling.py",
                "runtime/compile/bundle.py")
_PATTERNS = "runtime/compile/sources.py"  # its strings have the name in patterns, anywhere
_BEGINS = re.compile(r"""([rRfFbB]*(?:'''|\"""|'|"))tkq(?=\\?\.\w|\\?\.\\|\.\{|::|(?:'''|\"""|'|")$)""")
_MAY_BEGIN = re.compile(r"""['"]tkq(?:['"]|\\?\.|::)""")
_LAYERS = '''"""Modules in the place of transformers', by the names that its layers have for the hub."""
import torch
from torch import nn

from .norms.ops import rmsnorm


class RMSNorm(nn.Module):
    """Of Llama and many others: weight and variance_epsilon are the replaced module's."""

    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states if hidden_states.stride(-1) == 1 else hidden_states.contiguous()
        out = torch.promote_types(x.dtype, self.weight.dtype)  # as `weight * x` is
        return rmsnorm(x, self.weight, eps=self.variance_epsilon, out_dtype=None if out == x.dtype else out)
'''
_ALSO = '''

_root = _sys.modules[__name__]
from . import layers  # noqa: E402
'''
_EARLIER = '''"""The kernel's names, where earlier versions of `kernels` look for them."""
import importlib.util as _util
import pathlib as _pathlib
import sys as _sys

_NAME = {name!r}
if _NAME not in _sys.modules:
    _spec = _util.spec_from_file_location(_NAME, _pathlib.Path(__file__).parents[1] / "__init__.py")
    _sys.modules[_NAME] = _util.module_from_spec(_spec)
    _spec.loader.exec_module(_sys.modules[_NAME])
_kernel = _sys.modules[_NAME]
layers, __version__, __all__ = _kernel.layers, _kernel.__version__, _kernel.__all__


def __getattr__(name):
    return getattr(_kernel, name)
'''
_README = '''---
license: apache-2.0
library_name: kernels
tags: [kernels, hopper]
---

# tkq {version}

GPU kernels for NVIDIA Hopper (sm_90a) in the CuTe DSL: attention, GEMM, norms, losses, linear attention. The functions
are those of the Python package `tkq`; kernels are compiled at their first call, and cached.

    from kernels import get_kernel

    tkq = get_kernel("OWNER/tkq", version={major})
    o = tkq.flash_attn(q, k, v, causal=True)

`layers.RMSNorm` takes the place of transformers' norms. Needs nvidia-cutlass-dsl and apache-tvm-ffi.
'''


def write(folder: pathlib.Path) -> pathlib.Path:
    """Make the kernel's folder anew; returns that of its variant. Anything else in ``folder`` stays.

    Raises:
        ValueError: a file of tkq that cannot be rewritten.
    """
    name = identifier()
    variant = folder / "build" / VARIANT
    shutil.rmtree(variant, ignore_errors=True)
    for path in files():
        relative = path.relative_to(_TKQ)
        target = variant / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".py":
            target.write_text(renamed(path.read_text(), relative.as_posix(), name))
        else:
            shutil.copyfile(path, target)
    with (variant / "__init__.py").open("a") as init:
        init.write(_ALSO)
    (variant / "layers.py").write_text(_LAYERS)
    (variant / "tkq").mkdir()
    (variant / "tkq" / "__init__.py").write_text(_EARLIER.format(name=name))
    (variant / "metadata.json").write_text(json.dumps(metadata(name), indent=2) + "\n")
    (folder / "README.md").write_text(_README.format(version=__version__, major=metadata(name)["version"]))
    return variant


def files() -> list[pathlib.Path]:
    """Of tkq, those that the kernel has."""
    found = [path for path in sorted(_TKQ.rglob("*")) if path.suffix in (".py", ".c", ".h")]
    return [path for path in found if _belongs(path.relative_to(_TKQ).as_posix())]


def _belongs(relative):
    if relative.startswith("integrations/"):
        return relative.removeprefix("integrations/") in INTEGRATIONS
    return not any(relative == one or relative.startswith(f"{one}/") for one in LEFT_OUT)


def identifier() -> str:
    """The kernel's own name, of its version and its sources."""
    digest = hashlib.sha256()
    for path in files():
        digest.update(f"{path.relative_to(_TKQ).as_posix()}\n".encode() + path.read_bytes())
    return f"tkq_cuda_{digest.hexdigest()[:12]}"


def metadata(name: str) -> dict:
    """Versions of a kernel are whole numbers; before 1.0 the minor one says what fits together."""
    major, minor, _ = (int(part) for part in __version__.split("."))
    return {"name": "tkq", "id": name, "version": major if major else minor, "license": "Apache-2.0",
            "python-depends": _DEPENDS, "backend": {"type": "cuda", "archs": ["9.0a"]}}


# ---- under another name ----------------------------------------------------------------------------------------------


def renamed(source: str, relative: str, name: str) -> str:
    """The source of a file of tkq (its path in tkq) as it stands in the kernel.

    Raises:
        ValueError: an import in another form than those that are known here.
    """
    if "tkq" not in source:
        return source
    lines = source.splitlines(keepends=True)
    tree = ast.parse(source)
    level = "." * (relative.count("/") + 1)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").partition(".")[0] == "tkq":
            _replace(lines, node, r"from tkq\b\.?", f"from {level}", relative)
        elif isinstance(node, ast.Import) and any(part.name.partition(".")[0] == "tkq" for part in node.names):
            _replace(lines, node, r"import tkq\b.*", _relative(node, level, relative), relative)
    text = "".join(lines)
    if relative == _PATTERNS or _MAY_BEGIN.search(text):
        text = _strings(text, relative, name)
    return re.sub(r"\btorch\.ops\.tkq\b", f"torch.ops.{name}", text)


def _replace(lines, node, pattern, what, relative):
    line = lines[node.lineno - 1].encode()
    head, tail = line[:node.col_offset].decode(), line[node.col_offset:].decode()
    found, count = re.subn(f"^{pattern}", what, tail, count=1)
    if not count:
        raise ValueError(f"{relative}, line {node.lineno}: got {tail.strip()!r}, allowed are one import of tkq a line")
    lines[node.lineno - 1] = head + found


def _relative(node, level, relative):
    """``import tkq`` and ``import tkq.a.b as c``; ``import tkq.a`` binds what has no name in the kernel."""
    (part, *more) = node.names
    package, _, module = part.name.rpartition(".")
    if more or (package and part.asname is None):
        raise ValueError(f"{relative}, line {node.lineno}: allowed are `import tkq` and `import tkq.module as name`")
    if not package:
        return f"from {level} import _root as {part.asname or 'tkq'}"
    return f"from {level}{package.removeprefix('tkq').removeprefix('.')} import {module} as {part.asname}"


def _strings(source, relative, name):
    """Names of modules and of operators in strings, but for docstrings."""
    lines, docstrings = source.splitlines(keepends=True), _docstrings(ast.parse(source))
    for token in reversed(list(tokenize.generate_tokens(io.StringIO(source).readline))):
        kind = tokenize.tok_name[token.type]
        if kind not in ("STRING", "FSTRING_START") or token.start in docstrings:
            continue
        row, column = token.start[0] - 1, token.start[1]
        head, tail = lines[row][:column], lines[row][column:]
        if relative == _PATTERNS and kind == "STRING" and token.start[0] == token.end[0]:
            end = token.end[1] - column
            tail = re.sub(r"\btkq\b", name, tail[:end]) + tail[end:]
        else:
            tail = _renamed_string(tail, token, relative, name)
        lines[row] = head + tail
    return "".join(lines)


def _renamed_string(tail, token, relative, name):
    text = token.string if tokenize.tok_name[token.type] == "STRING" else tail.rstrip("\n")
    found = _BEGINS.match(text)
    if not found or "b" in found[1].lower():
        return tail
    alone = text[found.end():found.end() + 1] in "\"'"
    if alone and relative in _NOT_MODULES:
        return tail
    return f"{found[1]}{name}{tail[found.end():]}"


def _docstrings(tree):
    """Where they begin."""
    return {(node.body[0].lineno, node.body[0].col_offset) for node in ast.walk(tree)
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            and node.body and isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant)}


def main(words=None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tkq.warmup.hub", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=pathlib.Path, help="made if it is not there; its build/torch-cuda is made anew")
    folder = parser.parse_args(words).folder
    print(f"{write(folder)}: {metadata(identifier())['id']}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
