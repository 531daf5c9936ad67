"""The pages of the API, made of signatures and docstrings when the site is built: {page: Markdown}."""
from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
from pathlib import Path

import tkq

from .docstrings import first_sentence, markdown, of

# page -> (title, modules whose public names it has)
MODULES = {
    "nn": ("Modules: tkq.nn", ("tkq.nn",)),
    "integrations": ("Integrations", ("tkq.integrations.sdpa", "tkq.integrations.transformers", "tkq.integrations.fla",
                                      "tkq.integrations.mamba_ssm", "tkq.integrations.causal_conv1d",
                                      "tkq.integrations.scaled_mm", "tkq.flash_attn_interface")),
    "runtime": ("Compile and cache: tkq.runtime", ("tkq.runtime", "tkq.runtime.compile.fake", "tkq.runtime.device.arch",
                                                   "tkq.runtime.call.counters")),
    "models": ("Models: tkq.models", ("tkq.warmup.models",)),
    "reference": ("Reference implementations: tkq.reference", (
        "tkq.reference", "tkq.reference.attention", "tkq.reference.norms", "tkq.reference.losses",
        "tkq.reference.pointwise", "tkq.reference.dense", "tkq.reference.fp8", "tkq.reference.grouped")),
    "kernels": ("Base classes of reductions",
                ("tkq.reduction_base", "tkq.rows.persistent.kernel", "tkq.rows.one_pass.kernel",
                                               "tkq.rows.persistent.monoid", "tkq.rows.persistent.launch",
                 "tkq.reduction.geometry")),
    "tile": ("The tile layer: tkq.tile", ("tkq.tile",)),
    "utils": ("Device helpers: tkq.utils", ("tkq.utils",)),
    "testing": ("Testing kernels: tkq.testing", ("tkq.testing", "tkq.testing.timing")),
    "viz": ("Diagrams of kernels: tkq.viz", ("tkq.viz",)),
}

FOR_SUBCLASSES = ("ReductionBase",)  # classes whose names with an underscore belong to subclasses


def operations() -> dict:
    """The public functions, in the order of their names."""
    return {name: getattr(tkq, name) for name in sorted(tkq.__all__) if inspect.isfunction(getattr(tkq, name))}


def pages() -> dict[str, str]:
    """All of them: an index, one a function, one a module."""
    found = {f"api/{name}.md": function_page(name, thing) for name, thing in operations().items()}
    for page, (title, modules) in MODULES.items():
        there = [name for name in modules if importlib.util.find_spec(name)]
        if there:
            found[f"api/{page}.md"] = module_page(title, there)
    return {"api/index.md": index(found), **found}


def navigation() -> list:
    """The pages in order, as mkdocs has them."""
    there = (f"api/{page}.md" for page, (_, modules) in MODULES.items() if importlib.util.find_spec(modules[0]))
    return [{"Overview": "api/index.md"}, *(f"api/{name}.md" for name in operations()), *there]


def index(found) -> str:
    """One line a function and a module."""
    ops = "\n".join(f"| [`tkq.{name}`]({name}.md) | {first_sentence(thing.__doc__)} |"
                    for name, thing in operations().items())
    modules = "\n".join(f"- [{title}]({page}.md)" for page, (title, _) in MODULES.items() if f"api/{page}.md" in found)
    return f"""# API

These pages are generated from signatures and docstrings when the site is built. [Support](../support.md) lists what
each function supports. [`tkq.reference`](reference.md) defines the functions in plain PyTorch and runs CPU tensors.

| function | result |
| --- | --- |
{ops}

## Modules

{modules}
"""


def function_page(name: str, thing) -> str:
    """A function of tkq."""
    return f"# tkq.{name}\n\n{_signature(f'tkq.{name}', thing)}\n\n{of(thing)}\n"


def module_page(title: str, names) -> str:
    """All public names of some modules."""
    parts = [f"# {title}"]
    for name in names:
        parts += [f"## {name}"] if len(names) > 1 else []
        parts += _of_module(name)
    return "\n\n".join(parts) + "\n"


def _of_module(name) -> list[str]:
    try:
        module = importlib.import_module(name)
    except ImportError:  # needs a package that is not here
        return _of_source(name)
    parts, groups = [markdown(module.__doc__ or "")], {}
    for public, value in sorted(_public(module), key=lambda member: member[0].lower()):
        groups.setdefault(getattr(value, "__module__", name), []).append(_member(name, public, value))
    for origin in sorted(groups):
        parts += [_heading(name, origin)] if len(groups) > 1 else []
        parts += groups[origin]
    return parts


def _heading(package, origin) -> str:
    """Of what a package gives from one of its modules: what that says of all of them: who calls them, say."""
    doc = importlib.import_module(origin).__doc__ if origin.startswith(package + ".") else ""
    return f"## {origin.rpartition('.')[2]}" + (f"\n\n{markdown(doc)}" if doc else "")


def _of_source(name) -> list[str]:
    """As `_of_module`, from the text of a module that cannot be imported here: its functions alone."""
    tree = ast.parse(Path(importlib.util.find_spec(name).origin).read_text())
    parts = [markdown(ast.get_docstring(tree) or "")]
    for node in tree.body:
        doc = isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and ast.get_docstring(node)
        if doc:
            for argument in ast.walk(node.args):
                if isinstance(argument, ast.arg):
                    argument.annotation = None
            signature = _wrapped(f"{name}.{node.name}", f"({ast.unparse(node.args)})")
            parts.append(f"### {node.name}\n\n```python\n{signature}\n```\n\n{markdown(doc)}")
    return parts


def _public(module):
    """(name, value) of what a module gives: its __all__, or what it defines; documented functions and classes."""
    names = getattr(module, "__all__", None)
    for name in names or [n for n in vars(module) if not n.startswith("_")]:
        value = getattr(module, name)
        ours = names or getattr(value, "__module__", "") == module.__name__
        if ours and (inspect.isclass(value) or callable(value)) and getattr(value, "__doc__", None):
            yield name, value


def _member(module, name, value) -> str:
    parts = [f"### {name}", _signature(f"{module}.{name}", value), of(value)]
    if inspect.isclass(value):
        parts += [_method(name, method, found) for method, found in _methods(value)]
    return "\n\n".join(part for part in parts if part)


def _methods(cls):
    """(name, function or property) of a class's own public members with a docstring. Of ReductionBase, whose names are
    the tutorial's, those with an underscore are a subclass's to call and to override."""
    for name, value in vars(cls).items():
        found = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        documented = (inspect.isfunction(found) or isinstance(found, property)) and found.__doc__
        if documented and (not name.startswith("_") or (cls.__name__ in FOR_SUBCLASSES and name[:2] != "__")):
            yield name, found


def _method(cls, name, found):
    text = markdown(found.__doc__)
    if isinstance(found, property):
        return f"**`{cls}.{name}`** (property)\n\n{text}"
    return f"**`{cls}.{name}{_parameters(found)}`**\n\n{text}"


def _signature(name, value) -> str:
    return f"```python\n{_wrapped(name, _parameters(value))}\n```"


def _parameters(value) -> str:
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return "(...)"
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    shown = str(signature.replace(parameters=plain, return_annotation=signature.empty))
    return re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", shown).replace("<factory>", "...")


def _wrapped(name, parameters) -> str:
    """At most 84 characters a line, broken at commas."""
    lines, line = [], name + "("
    for part in parameters[1:-1].split(", "):
        if len(line) + len(part) > 82:
            lines.append(line.rstrip())
            line = " " * (len(name) + 1)
        line += part + ", "
    return "\n".join((*lines, line.removesuffix(", ") + ")"))
