"""A graph's value by PyTorch, for all scores at once: the CPU path, and what kernels are judged by."""
import torch

_TORCH = {"bool": torch.bool, "i32": torch.int32, "i64": torch.int64}
_UNARY = {"neg": torch.neg, "abs": torch.abs, "not": torch.logical_not, "round": torch.round,
          **{name: getattr(torch, name) for name in ("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "tanh", "sin",
                                                     "cos", "erf", "floor", "ceil", "trunc")}}
_BINARY = {"add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.true_divide,
           "floordiv": torch.floor_divide, "truncdiv": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
           "mod": torch.remainder, "pow": torch.pow, "min": torch.minimum, "max": torch.maximum,
           "shl": torch.bitwise_left_shift, "shr": torch.bitwise_right_shift,
           **{name: getattr(torch, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")}}
_BITS = {"and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor}


def evaluate(graph, tensors, numbers, inputs, dtype=torch.float32):
    """The value of the result: a tensor as wide as what it depends on.

    inputs: name -> tensor, of shapes that go together. dtype: of what is "f32" in the graph."""
    return values(graph, tensors, numbers, inputs, dtype)[-1]


def values(graph, tensors, numbers, inputs, dtype=torch.float32) -> list:
    """The same, of each node."""
    device, found = inputs["q"].device, []
    kind = {**_TORCH, "f32": dtype}
    for i, node in enumerate(graph.nodes):
        take = lambda args=node.args: [found[a] for a in args]
        if node.op == "input":
            value = inputs[node.args[0]]
        elif node.op == "const":
            value = torch.tensor(node.args[0], device=device)
        elif node.op == "number":
            value = torch.tensor(numbers[node.args[0]], device=device)
        elif node.op == "load":
            value = _load(tensors[node.args[0]], [found[a] for a in node.args[3:]])
        elif node.op == "cast":
            value = take()[0].detach() if graph.is_detached(i) else take()[0]
        elif node.op == "where":
            value = torch.where(*take())
        elif node.op in _UNARY and node.op != "not":
            value = _UNARY[node.op](*take())
        elif node.op == "not":
            value = torch.logical_not(*take()) if node.type == "bool" else torch.bitwise_not(*take())
        else:
            value = {**_BINARY, **_BITS}[node.op](*take())
        found.append(value.to(kind[node.type]))
    return found


def places_in(x, at) -> tuple:
    """Of elements, by indices that count from the end where they are negative, and are kept inside."""
    inside = []
    for index, size in zip(at, x.shape):
        index = index.long()
        inside.append(torch.where(index < 0, index + size, index).clamp(0, size - 1))
    return tuple(inside)


def _load(x, at):
    return x[places_in(x, at)] if at else x
