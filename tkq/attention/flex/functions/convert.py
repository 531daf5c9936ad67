"""From make_fx's graph of ATen operations to ours: each operation by its name, everything else refused."""
from __future__ import annotations

import torch

from tkq.attention.flex.functions import pointwise, views
from tkq.attention.flex.functions.captures import INT, is_argument
from tkq.attention.flex.functions.graph import INPUTS, Builder, operands_of
from tkq.attention.flex.functions.views import View

_TYPES = {torch.bool: "bool", torch.uint8: "i32", torch.int8: "i32", torch.int16: "i32", torch.int32: "i32",
          torch.int64: "i64", torch.float16: "f32", torch.bfloat16: "f32", torch.float32: "f32"}
_NARROW = (torch.uint8, torch.int8, torch.int16)
NAMES = {torch.bool: "bool", torch.uint8: "uint8", torch.int8: "int8", torch.int16: "int16", torch.int32: "int32",
         torch.int64: "int64", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
_SAME = ("alias", "detach", "clone", "contiguous", "lift_fresh_copy", "lift_fresh")
_RESHAPED = ("view", "reshape", "expand", "unsqueeze", "squeeze", "view_as")  # one number stays one number
_FILLED = {"full": 1, "full_like": 1, "new_full": 2, "scalar_tensor": 0}  # where the value is
# Options that are looked at, or say nothing of a number; others are refused
_OPTIONS = frozenset(("alpha", "rounding_mode", "min", "max", "dtype", "device", "layout", "pin_memory",
                      "memory_format", "non_blocking", "implicit", "copy"))
_ONES_ZEROS = {"ones": 1, "zeros": 0, "ones_like": 1, "zeros_like": 0, "new_ones": 1, "new_zeros": 0}


def constants_of(program) -> list:
    """The real tensors of a program, in order."""
    return [_held(getattr(program, node.target)) for node in program.graph.nodes if node.op == "get_attr"]


def _held(x):
    return getattr(x, "constant", None) if getattr(x, "constant", None) is not None else x


def refuse_dtype(op, name, dtype):
    if dtype not in _TYPES:
        raise NotImplementedError(f"{op}: {name}: a number of {dtype}, supported are {', '.join(NAMES.values())}")


def graph_of(of, program, arguments, tensors):
    """(graph, which captured tensors it takes, which captured numbers). of: (name, op), of ``trace``. arguments: names
    of the first placeholders; the next ``tensors`` are captured tensors, the others numbers. tensors: None where
    captured ones are the program's constants."""
    return Converter(of, arguments, tensors).run(program)


class Converter:
    """known: of each node of the program a node of ``build``, or a ``View``."""

    def __init__(self, of, arguments, tensors):
        (self.name, self.op), self.arguments, self.tensors = of, arguments, tensors
        self.build, self.known, self.held = Builder(), {}, 0

    def refuse(self, what):
        raise NotImplementedError(f"{self.op}: {self.name}: {what}")

    def run(self, program):
        for i, node in enumerate(program.graph.nodes):
            if node.op == "placeholder":
                self.known[node] = self.placeholder(i, node)
            elif node.op == "get_attr":
                self.known[node] = self.constant(_held(getattr(program, node.target)))
            elif node.op == "call_function":
                self.known[node] = self.called(node)
            elif node.op == "output":
                return self.result(node.args[0])
        raise AssertionError("a program without output")

    def placeholder(self, i, node):
        if i < len(self.arguments):
            name = self.arguments[i]
            return self.build.add("input", INPUTS[name], name)
        i -= len(self.arguments)
        value = node.meta["val"]
        if i < (self.tensors or 0):
            return self.captured(i, value)
        return self.build.add("number", self.type_of(value.dtype), i - (self.tensors or 0))

    def captured(self, slot, value):
        self.type_of(value.dtype)
        if not value.numel():
            raise ValueError(f"{self.op}: {self.name}: a captured tensor is {tuple(value.shape)}, allowed are tensors "
                             "with elements")
        return self.loaded(views.whole(slot, value))

    def loaded(self, view: View):
        """A node, where all indices are known."""
        if view.free:
            return view
        dtype = view.tensor.dtype
        found = self.build.add("load", self.type_of(dtype), view.slot, NAMES[dtype], view.tensor.dim(), *view.fixed)
        return self.build.detached(found) if view.detached else found

    def constant(self, value):
        """A real tensor that the function holds: a number, where it has no dimension and lies on the CPU."""
        slot, self.held = self.held, self.held + 1
        if value.dim() == 0 and value.device.type == "cpu" and not value.requires_grad:
            return self.build.const(value.item(), self.type_of(value.dtype))
        if self.tensors is not None:
            self.refuse(f"a tensor {tuple(value.shape)} made inside, supported are captured ones")
        return self.captured(slot, value)

    # ---- values -------------------------------------------------------------------------------------

    def type_of(self, dtype):
        refuse_dtype(self.op, self.name, dtype)
        return _TYPES[dtype]

    def node(self, x, type=None, what="an operation"):
        """The number of the node of an FX argument, cast to ``type``."""
        if isinstance(x, (bool, int, float)):
            kind = "bool" if isinstance(x, bool) else "f32" if isinstance(x, float) else \
                "i32" if -2**31 <= x < 2**31 else "i64"
            found = self.build.const(x, kind)
        else:
            found = self.known.get(x)
        if isinstance(found, View):
            self.refuse(f"{what} of a captured tensor {tuple(found.tensor.shape)}, supported are its elements, by an "
                        "index for each dimension")
        if not isinstance(found, int):
            self.refuse(f"{what} of {x!r}")
        return found if type is None else self.build.cast(found, type)

    @staticmethod
    def meta(x):
        return x.meta["val"] if isinstance(x, torch.fx.Node) else x

    def common(self, a, b):
        """(type, dtype) in which ATen computes with two arguments."""
        dtype = torch.result_type(self.meta(a), self.meta(b))
        return self.type_of(dtype), dtype

    def narrow(self, what, dtype):
        """Refuse arithmetic whose results wrap around."""
        if dtype in _NARROW:
            self.refuse(f"{what} of {dtype}, whose results wrap around; supported are int32 and int64: call .int()")

    def narrow_beside_a_number(self, what, a, b):
        """The same of one of Python's, which has the other's type; its stand-in has int32."""
        for x, other in ((a, b), (b, a)):
            number = self.known.get(other) if isinstance(other, torch.fx.Node) else None
            if isinstance(number, int) and self.build.nodes[number].op == "number" and isinstance(x, torch.fx.Node):
                self.narrow(what, self.meta(x).dtype)

    def is_of_numbers(self, i):
        """Is node i made of captured numbers, and nothing else but constants?"""
        found, waiting = False, [i]
        while waiting:
            node = self.build.nodes[waiting.pop()]
            if node.op in ("input", "load"):
                return False
            found |= node.op == "number"
            waiting.extend(operands_of(node))
        return found

    def leaves_its_type(self, op, a, b):
        """May an operation on captured numbers, or on one and a constant, leave the numbers of its type, where Python's
        does not?"""
        kind, numbers = self.build.type_of(a), (self.is_of_numbers(a), self.is_of_numbers(b))
        if kind == "f32":
            far = [x is not None and not is_argument(x) for x in (self.build.value(a), self.build.value(b))]
            return (all(numbers) and op != "div") or (any(numbers) and any(far))
        if op == "div" or kind == "bool":
            return False
        x, y = self.largest(a), self.largest(b)
        if x is None or y is None or not any(numbers):
            return False
        if op in ("shl", "pow"):
            return True
        return (x * y if op == "mul" else x + y) >= 1 << (31 if kind == "i32" else 63)

    def largest(self, i):
        """How large an integer of captured numbers and constants may be, whatever its sign; None of others."""
        node = self.build.nodes[i]
        if node.op == "const":
            return abs(node.args[0])
        if node.op == "number":
            return INT if node.type == "i32" else None
        of = [self.largest(a) for a in operands_of(node)]
        if not of or None in of or node.op == "load":
            return None
        if node.op == "mul":
            return of[0] * of[1]
        return sum(of) + 1  # as large as add makes it; others stay below

    def truth(self, x):
        """x as a bool: is it other than 0?"""
        found = self.node(x)
        kind = self.build.type_of(found)
        return found if kind == "bool" else self.build.binary("ne", found, self.build.const(0, kind))

    def result(self, x):
        if isinstance(x, (tuple, list)) and len(x) == 1:
            x = x[0]
        if not isinstance(x, (torch.fx.Node, bool, int, float)):
            raise TypeError(f"{self.op}: {self.name}: gives {x!r}, allowed is one scalar tensor")
        value = self.meta(x)
        if isinstance(value, torch.Tensor) and value.numel() != 1:
            raise TypeError(f"{self.op}: {self.name}: gives a tensor {tuple(value.shape)}, allowed is a scalar")
        found = self.node(x, what="the result")
        kind = self.build.type_of(found)
        if self.name == "mask_mod" and kind != "bool":
            raise TypeError(f"{self.op}: mask_mod: gives {getattr(value, 'dtype', type(value))}, allowed is bool")
        if self.name == "score_mod" and kind == "bool":
            raise TypeError(f"{self.op}: score_mod: gives a bool, allowed are numbers")
        return self.build.finish(self.build.cast(found, "bool" if self.name == "mask_mod" else "f32"))

    # ---- operations ---------------------------------------------------------------------------------

    def called(self, node):
        for option, given in node.kwargs.items():
            if option not in _OPTIONS and given is not None:
                self.refuse(f"{node.target} with {option}={given!r}, which no kernel has")
        try:
            return self.call(node)
        except OverflowError as problem:
            raise ValueError(f"{self.op}: {self.name}: {problem}, as {node.target} has it; call .long()") from problem

    def call(self, node):
        packet = getattr(node.target, "overloadpacket", None)
        if packet is None or not str(packet).startswith("aten."):
            self.refuse(f"{node.target}, which no kernel has")
        name = packet.__name__
        name = name[:-1] if name.endswith("_") and not name.endswith("__") else name
        if not isinstance(node.meta["val"], torch.Tensor):
            self.refuse(f"aten.{name}, which has several results")
        x = self.known.get(node.args[0]) if node.args and isinstance(node.args[0], torch.fx.Node) else None
        found = self.of_view(name, x, node) if isinstance(x, View) else self.of_number(name, x, node)
        if found is None:
            self.refuse(f"aten.{name}, which no kernel has")
        return found

    def of_number(self, name, x, node):
        """None where there is no such operation."""
        value = node.meta["val"]
        if name == "detach" and self.name == "score_mod":
            return self.build.detached(x)
        if (name in _SAME or name in _RESHAPED) and value.numel() == 1:
            return x
        if name in _FILLED or name in _ONES_ZEROS:
            return self.filled(name, node.args, value)
        return pointwise.convert(self, name, node)

    def filled(self, name, args, value):
        if value.numel() != 1:
            self.refuse(f"aten.{name} of {tuple(value.shape)}, supported are scalars")
        of = args[_FILLED[name]] if name in _FILLED else _ONES_ZEROS[name]
        return self.node(of, self.type_of(value.dtype))

    def of_view(self, name, x, node):
        """Of a captured tensor: views, and elements."""
        args = node.args[1:]
        if name in _SAME:
            return x._replace(detached=True) if name == "detach" and self.name == "score_mod" else x
        if name in _FILLED or name in _ONES_ZEROS:
            return self.filled(name, node.args, node.meta["val"])
        if name == "select":
            return self.loaded(views.select(self.build, x, *args))
        if name == "index":
            return self.indexed(x, args[0])
        if name == "slice":
            return views.sliced(x, *args)
        return views.permuted(x, name, args) if name in ("permute", "transpose", "t") else self.node(
            node.args[0], what=f"aten.{name}")

    def indexed(self, view, indices):
        dim = 0
        for i in indices:
            if i is None:
                dim += 1
                continue
            value = self.meta(i)
            if value.numel() != 1 or value.dtype in (torch.bool, torch.uint8):
                self.refuse(f"aten.index by {value.dtype} of {tuple(value.shape)}, supported are scalar integers")
            view = views.at(self.build, view, dim, self.node(i))
        return self.loaded(view)
