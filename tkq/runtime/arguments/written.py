"""A function's checks as straight code, written from its table once: as dataclasses writes an ``__init__``.

A loop over the table would be paid at every call that is not replayed, and torch.compile would guard each entry of the
table that it reads. What is written for ``eps``, a number from 0 on, is

    if type(eps) is not float or not 0 <= eps < END: eps = of_eps.take("rmsnorm", eps)
"""
from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .tables import TABLES


def checker(op: str, *names: str, called: str = "", also: tuple = ()):
    """A function of the values of these arguments of an op, in this order, which raises what ``Argument.take`` does,
    and returns the values as the op goes on with them: a tuple; the one itself of a single name.

    called: the name that errors say, where it is not the op's. also: types that its tensors may have too."""
    arguments = {a.name: replace(a, dtypes=(*a.dtypes, *also)) if also and a.kind == "tensor" else a
                 for a in TABLES[op]}
    return checker_of(called or op, *(arguments[name] for name in names))


def checker_of(called: str, *arguments):
    """The same of arguments that are in no table: a layer's, or another library's function's. called: the name that
    errors say."""
    known = {"Tensor": Tensor, "torch_dtype": torch.dtype, "strided": torch.strided,
             "traced": torch.compiler.is_dynamo_compiling}
    names = [argument.name for argument in arguments]
    lines = [f"def check({', '.join(names)}):"]
    for name, argument in zip(names, arguments):
        known |= {f"of_{name}": argument, f"types_{name}": argument.types}
        wrong = _wrong(argument)
        if argument.none:
            wrong = f"{name} is not None and ({wrong})"
        lines += [f"    if {wrong}:", f"        {name} = of_{name}.take({called!r}, {name})"]
    lines.append(f"    return {', '.join(names)}")
    exec(compile("\n".join(lines), f"<tkq arguments of {called}>", "exec"), known)
    return known["check"]


def _wrong(argument) -> str:
    """Code that is true where a value has to be looked at closely: all that is not plain and plainly allowed."""
    name, kind, low, high = argument.name, argument.kind, argument.low, argument.high
    end = repr(argument.end)  # in figures: Dynamo takes a name's number for one that varies
    if kind == "flag":
        return f"{name} is not True and {name} is not False"
    if kind == "number":
        least = f"-{end} <" if low is None else f"{low} {'<' if argument.above else '<='}"
        return f"type({name}) is not float or not {least} {name} {f'< {end}' if high is None else f'<= {high}'}"
    if kind == "integer":
        inside = f"{'' if low is None else f'{low} <= '}{name}{'' if high is None else f' <= {high}'}"
        return f"type({name}) is not int" + (f" or not {inside}" if inside != name else "")
    if kind == "choice":
        return f"type({name}) is not str or {name} not in {argument.choices!r}"
    if kind == "dtype":
        return f"type({name}) is not torch_dtype or {name} not in types_{name}"
    if kind == "limits":
        floats = f"type({name}[0]) is not float or type({name}[1]) is not float"
        inside = f"-{end} < {name}[0] <= {name}[1] and ({name}[1] < {end} or {name}[1] == 1e999)"  # 1e999: infinity
        return f"type({name}) is not tuple or len({name}) != 2 or {floats} or not ({inside})"
    if kind == "tensor":
        pending = f" or {name}.is_neg()" if "e4m3" in argument.dtypes else ""  # which torch cannot do in float8
        return (f"not isinstance({name}, Tensor) or {name}.dtype not in types_{name} or not traced() and "
                f"({name}.layout is not strided or {name}.is_nested{pending})")
    return "True"
