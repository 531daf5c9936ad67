"""Odd values in the place of usual ones, by the kind of the argument.

``REPLACED`` has two tables for each kind: what an operation may take, whose result is judged then, or refuse by name;
and what it must refuse. A tensor's odd forms may be taken or refused.
"""
import decimal
import fractions
import math

import numpy as np
import torch

INT32 = torch.iinfo(torch.int32)
_SCALING = getattr(torch.nn.functional, "ScalingType", None)  # torch 2.10 and later


class Subclass(torch.Tensor):
    """A tensor of a subclass of the user's."""


class FloatSubclass(float):
    """A number of a subclass of the user's."""


# ---- tensors: what becomes of one ---------------------------------------------------------------------------------


def _in_larger(x, columns, at, step=1):
    """x's numbers inside a tensor with more columns, whose other numbers are zero."""
    larger = x.new_zeros(*x.shape[:-1], columns)
    view = larger[..., at:at + step * x.shape[-1]:step]
    return view.copy_(x)


def _misaligned(x):
    return x.new_zeros(x.numel() + 1)[1:].view(x.shape).copy_(x)


def _with(value):
    def poisoned(x, draw):
        x = x.clone()
        x.view(-1)[draw.random.randrange(x.numel())] = value
        return x
    return poisoned


def _inference(x):
    with torch.inference_mode():
        return x.clone()


def _elsewhere(x, draw):
    return x.cpu() if x.is_cuda and draw.chance(0.7) else x.to("meta")


def _nested(layout):
    return lambda x: torch.nested.nested_tensor(list(x.unbind(0)) or [x], layout=layout)


def _repeated(x):
    return torch.as_strided(x, x.shape, [0] * (x.dim() - 1) + [1])


def _sliding(x):
    return torch.as_strided(x, x.shape, [1] * x.dim())


DTYPES = [torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64,
          torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32, torch.float8_e8m0fnu,
          torch.uint32]

NOT_DENSE = {
    "None": lambda x: None, "list": lambda x: x.float().tolist(), "numpy": lambda x: x.float().cpu().numpy(),
    "float": lambda x: 1.5, "str": lambda x: "x", "object": lambda x: object(),
    "quantized": lambda x: torch.quantize_per_tensor(x.float().cpu(), 0.1, 0, torch.qint8),
    "sparse_coo": lambda x: x.to_sparse(), "sparse_csr": lambda x: x.reshape(-1, x.shape[-1]).to_sparse_csr(),
    "sparse_csc": lambda x: x.reshape(-1, x.shape[-1]).to_sparse_csc(), "nested": _nested(torch.strided),
    "jagged": _nested(torch.jagged), "mkldnn": lambda x: x.float().cpu().to_mkldnn(),
}
FORMS = {
    "unsqueeze": lambda x: x.unsqueeze(0), "unsqueeze last": lambda x: x.unsqueeze(-1), "first": lambda x: x[0],
    "0-d": lambda x: x.reshape(-1)[0], "no rows": lambda x: x[:0], "no columns": lambda x: x[..., :0],
    "empty": lambda x: x.new_empty(0), "one more column": lambda x: torch.cat([x, x[..., :1]], -1),
    "one column less": lambda x: x[..., :-1], "one more row": lambda x: torch.cat([x, x[:1]]),
    "one row less": lambda x: x[:-1], "flat": lambda x: x.reshape(-1), "mT": lambda x: x.mT,
    "last dimension strided": lambda x: _in_larger(x, 2 * x.shape[-1], 0, 2),
    "wide rows": lambda x: _in_larger(x, x.shape[-1] + 8, 0), "odd rows": lambda x: _in_larger(x, x.shape[-1] + 3, 1),
    "expanded row": lambda x: x[:1].expand(x.shape), "one number": lambda x: x.flatten()[:1].expand(x.shape),
    "rows at one place": _repeated, "rows that overlap": _sliding, "other order": lambda x: x.mT.contiguous().mT,
    "misaligned": _misaligned, "huge shape": lambda x: x.reshape(-1)[:1].expand(1 << 20),
    "9 dims": lambda x: x.reshape(*[1] * (9 - x.dim()), *x.shape),
    "60 dims": lambda x: x.reshape(*[1] * (60 - x.dim()), *x.shape),
}
STATES = {
    "Parameter": lambda x: torch.nn.Parameter(x, requires_grad=x.is_floating_point()),
    "requires_grad": lambda x: x.clone().requires_grad_(), "no leaf": lambda x: x.clone().requires_grad_().mul(1),
    "inference": _inference, "negation pending": lambda x: torch._neg_view(x.clone()),
    "imaginary part of a conjugate": lambda x: torch.complex(x.float(), x.float()).conj().imag,
    "zero tensor": lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype, device=x.device),
    "subclass": lambda x: x.as_subclass(Subclass), "meta": lambda x: x.to("meta"),
}
VALUES = {
    "NaN": _with(math.nan), "inf": _with(math.inf), "-inf": _with(-math.inf), "elsewhere": _elsewhere,
    "huge": lambda x, _: (x.float() * 1e37).to(x.dtype), "tiny": lambda x, _: (x.float() * 1e-30).to(x.dtype),
    "zeros": lambda x, _: torch.zeros_like(x),
    "largest ints": lambda x, _: torch.full_like(x, torch.iinfo(x.dtype).max),
    "least ints": lambda x, _: torch.full_like(x, torch.iinfo(x.dtype).min), "-5": lambda x, _: torch.full_like(x, -5),
    "int32's end": lambda x, _: torch.full_like(x, INT32.max),
}
TENSOR = {
    **{name: lambda x, _, make=make: make(x) for each in (NOT_DENSE, FORMS, STATES) for name, make in each.items()},
    **{f"as {str(t).removeprefix('torch.')}": lambda x, _, t=t: x.to(t) for t in DTYPES}, **VALUES,
}
# A GPU tensor without memory at its address: torch's own operations fail on it with an illegal access.
NOT_ON_CUDA = {"zero tensor"}

# ---- everything else: what comes in its place ---------------------------------------------------------------------

NUMBER = {
    "NaN": math.nan, "inf": math.inf, "-inf": -math.inf, "-1": -1, "-1.5": -1.5, "0": 0, "0.0": 0.0, "-0.0": -0.0,
    "1e39": 1e39, "3.4e38": 3.4e38, "1e-45": 1e-45, "np.float32": np.float32(1.5), "np.float64": np.float64(1.5),
    "np.int64": np.int64(2), "10**30": 10**30, "-10**30": -(10**30), "2**31": 2**31, "2**63": 2**63, "2**64": 2**64,
    "10**400": 10**400, "Fraction": fractions.Fraction(3, 2), "a float's subclass": FloatSubclass(1.5),
}
NO_NUMBER = {
    "True": True, "False": False, "str": "1", "bytes": b"1", "list": [1.0], "tuple": (1,), "dict": {},
    "np.bool": np.True_, "np.array": np.array([1.0, 2.0]), "tensor": torch.tensor(1.0), "int tensor": torch.tensor(2),
    "two numbers": torch.tensor([1.0, 2.0]), "complex": 1 + 0j, "Decimal": decimal.Decimal("1.5"), "object": object(),
    "dtype": torch.float32,
}
NO_FLAG = {
    "None": None, "0": 0, "1": 1, "2": 2, "1.0": 1.0, "str": "yes", "no str": "", "list": [], "np.bool": np.True_,
    "tensor": torch.tensor(True), "tensor of two": torch.tensor([True, False]), "object": object(), "NaN": math.nan,
}
WORD = {"None": None, "empty": "", "another": "nonsense", "upper": "MEAN", "function": lambda x: x, "type": str,
        "builtin": max, "os:system": "os:system", "colon": ":", "math:sqrt": "math:sqrt", "nul": "a\0b",
        "long": "x" * 10000, "old name of scales": "block", "none of scales": "line",
        **{f"torch's {name}": member for name, member in getattr(_SCALING, "__members__", {}).items()}}
NO_WORD = {"bytes": b"mean", "int": 1, "list": ["mean"], "dict": {}, "tensor": torch.tensor(1), "object": object(),
           "bool": True}
DTYPE = {**{str(t): t for t in DTYPES}, "None": None}
NO_DTYPE = {"str": "float32", "float": float, "np": np.float32, "int": 5, "list": [torch.float32],
            "tensor": torch.tensor(1.0), "object": object()}
WINDOW = {
    "None": None, "5": 5, "(1,)": (1,), "three": (1, 2, 3), "negative": (-2, 0), "float": (1.0, 2), "str": ("a", 1),
    "bools": (True, False), "big": (2**40, 0), "list": [1, 1], "np": (np.int64(1), 2), "tensor": (torch.tensor(1), 1),
    "tensors": torch.tensor([1, 2]), "string": "12", "NaN": (math.nan, 0), "dict": {1: 2, 3: 4}, "set": {1, 2},
    "10**30": (10**30, 0),
}
LIMITS = {
    "(0, 1)": (0, 1), "(-inf, inf)": (-math.inf, math.inf), "descending": (1.0, 0.5), "NaN": (math.nan, 1.0),
    "list": [0.0, 2.0], "np": (np.float32(0.5), np.float64(2)), "huge": (0.0, 1e300),
    "Fraction": (0, fractions.Fraction(1, 3)),
}
NO_LIMITS = {
    "None": None, "5": 5, "(1,)": (1.0,), "three": (0, 1, 2), "str": ("a", 1), "bools": (False, True),
    "tensors": torch.tensor([0.0, 1.0]), "string": "12", "dict": {1: 2, 3: 4}, "set": {1, 2},
}
DEVICE = {"None": None, "int": 0, "-1": -1, "str": "nonsense", "meta": "meta", "cpu:5": "cpu:5", "cuda:99": "cuda:99",
          "list": [], "float": 1.5, "device": torch.device("cpu")}

# kind: (values that may be taken, values that must be refused)
REPLACED = {
    "number": (NUMBER, NO_NUMBER), "flag": ({}, NO_FLAG), "word": (WORD, NO_WORD), "dtype": (DTYPE, NO_DTYPE),
    "window": (WINDOW, {}), "device": (DEVICE, {}),
    "limits": (LIMITS, NO_LIMITS),
}
