"""ATen's pointwise operations as nodes of a graph."""
from __future__ import annotations

import torch

from tkq.attention.flex.functions.graph import COMPARISONS, FLOAT

_BINARY = {"add": "add", "sub": "sub", "rsub": "sub", "mul": "mul", "floor_divide": "floordiv", "remainder": "mod",
           "pow": "pow", "minimum": "min", "maximum": "max", "bitwise_and": "and", "bitwise_or": "or",
           "bitwise_xor": "xor", "bitwise_left_shift": "shl", "bitwise_right_shift": "shr", "__lshift__": "shl",
           "__rshift__": "shr", "__and__": "and", "__or__": "or", "__xor__": "xor", "div": "div", "true_divide": "div",
           **{c: c for c in COMPARISONS}}
_LOGICAL = {"logical_and": "and", "logical_or": "or", "logical_xor": "xor"}
_WITHOUT_WRAP = (*COMPARISONS, "and", "or", "xor", "min", "max", "div")
_OTHER_NAMES = {"negative": "neg", "absolute": "abs", "fix": "trunc", "sgn": "sign", "to": "_to_copy",
                "clip": "clamp"}


def convert(of, name: str, node):
    """The number of the node that an FX node becomes; None of an operation that there is not. of: a ``Converter``."""
    name = _OTHER_NAMES.get(name, name)
    out = node.meta["val"].dtype
    if name in _BINARY:
        return _binary(of, name, node, out)
    if name in _LOGICAL:
        return of.build.binary(_LOGICAL[name], *(of.truth(a) for a in node.args))
    if name in FLOAT and len(node.args) == 1:
        return _float(of, name, node.args, out)
    return _OTHERS[name](of, name, node, out) if name in _OTHERS else None


def _binary(of, name, node, out):
    build, (a, b), op = of.build, node.args[:2], _BINARY[name]
    kind, dtype = of.common(a, b)
    if op == "div":
        op = {None: "div", "floor": "floordiv", "trunc": "truncdiv"}[node.kwargs.get("rounding_mode")]
        kind = of.type_of(out)
    if op not in _WITHOUT_WRAP:
        of.narrow(f"aten.{name}", dtype)
        of.narrow_beside_a_number(f"aten.{name}", a, b)
    if kind == "bool" and op in ("add", "mul", "sub"):
        of.refuse(f"aten.{name} of bools, supported are & and |")
    x, y = of.node(a, kind, f"aten.{name}"), of.node(b, kind, f"aten.{name}")
    if op in ("add", "sub", "mul", "shl", "pow", "div") and of.leaves_its_type(op, x, y):
        of.refuse(f"aten.{name} of captured numbers, which Python computes without wrapping around")
    alpha = node.kwargs.get("alpha", node.args[2] if len(node.args) > 2 else 1)
    if alpha != 1:
        scaled = build.const(alpha, kind)
        x, y = (build.binary("mul", x, scaled), y) if name == "rsub" else (x, build.binary("mul", y, scaled))
    if name == "rsub":
        x, y = y, x
    return _power(of, x, y, kind) if op == "pow" else build.binary(op, x, y)


def _power(of, x, y, kind):
    build, exponent = of.build, of.build.value(y)
    if exponent == 2:
        return build.binary("mul", x, x)
    if kind != "f32":
        of.refuse("aten.pow of integers, supported are floats and squares")
    if exponent == 0.5:
        return build.unary("sqrt", x)
    return build.unary("exp2", y) if build.value(x) == 2 else build.binary("pow", x, y)


def _float(of, name, args, out):
    if name in ("floor", "ceil", "round", "trunc") and of.type_of(out) != "f32":
        return of.node(args[0])  # of an integer: itself
    return of.build.unary(name, of.node(args[0], "f32", f"aten.{name}"))


def _where(of, name, node, out):
    condition, a, b = node.args if name == "where" else (node.args[1], node.args[2], node.args[0])
    kind = of.type_of(out)
    return of.build.where(of.truth(condition), of.node(a, kind), of.node(b, kind))


def _clamp(of, name, node, out):
    bounds = {"clamp": ("min", "max"), "clamp_min": ("min",), "clamp_max": ("max",)}[name]
    kind = of.type_of(out)
    found = of.node(node.args[0], kind)
    for i, which in enumerate(bounds):
        bound = node.args[1 + i] if len(node.args) > 1 + i else node.kwargs.get(which)
        if bound is not None:
            found = _bounded(of.build, which, found, of.node(bound, kind), kind)
    return found


def _bounded(build, which, x, bound, kind):
    """Of floats x where the two are the same: its slope counts there, as in PyTorch."""
    if kind != "f32":
        return build.binary("max" if which == "min" else "min", x, bound)
    return build.where(build.binary("lt" if which == "min" else "gt", x, bound), bound, x)


def _converted(of, name, node, out):
    of.narrow("a conversion", out if out != of.meta(node.args[0]).dtype else torch.int32)
    kind = of.type_of(out)
    return of.truth(node.args[0]) if kind == "bool" else of.node(node.args[0], kind)


def _sign(of, name, node, out):
    kind, build = of.type_of(out), of.build
    x, zero = of.node(node.args[0], kind), build.const(0, kind)
    # 0, or NaN: flat either way
    flat = build.binary("mul", x, zero) if kind == "f32" else zero
    down = build.where(build.binary("lt", x, zero), build.const(-1, kind), flat)
    return build.where(build.binary("gt", x, zero), build.const(1, kind), down)


def _same_type(of, name, node, out):
    """neg, abs, relu and square, which are of their argument's type."""
    of.narrow(f"aten.{name}", out)
    kind, build = of.type_of(out), of.build
    x = of.node(node.args[0], kind)
    if name == "relu":
        zero = build.const(0, kind)
        return build.where(build.binary("le", x, zero), zero, x) if kind == "f32" else build.binary("max", x, zero)
    return build.binary("mul", x, x) if name == "square" else build.unary(name, x)


def _inverse(of, name, node, out):
    """1 / x, or 1 / (1 + exp(-x))."""
    build, x = of.build, of.node(node.args[0], "f32")
    one = build.const(1.0, "f32")
    if name == "sigmoid":
        # exp stays finite, and the slope
        x = _bounded(build, "max", build.unary("neg", x), build.const(88.0, "f32"), "f32")
        x = build.binary("add", one, build.unary("exp", x))
    return build.binary("div", one, x)


def _not(of, name, node, out):
    return of.build.unary("not", of.truth(node.args[0]) if name == "logical_not" else of.node(node.args[0]))


_OTHERS = {"where": _where, "masked_fill": _where, "clamp": _clamp, "clamp_min": _clamp, "clamp_max": _clamp,
           "_to_copy": _converted, "sign": _sign, "logical_not": _not, "bitwise_not": _not,
           **dict.fromkeys(("neg", "abs", "relu", "square"), _same_type),
           **dict.fromkeys(("reciprocal", "sigmoid"), _inverse)}
