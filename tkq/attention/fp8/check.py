"""What a caller may pass to flash_attn_fp8."""
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from tkq.attention.fp8.spec import Fp8Spec
from tkq.runtime import arguments
from tkq.runtime.call import check, dtypes

OP = "flash_attn_fp8"
OPEN = (None, None)  # the default window_size
VECTOR = 16  # elements of 16 bytes
_tensors = arguments.checker(OP, "q", "k", "v", "q_descale", "k_descale", "v_descale")
flags = arguments.checker(OP, "causal", "return_lse")
numbers = arguments.checker(OP, "softmax_scale")
limits = arguments.checker(OP, "window_size")
words = arguments.checker(OP, "accumulate", "out_dtype")


class Call(NamedTuple):
    """The tensors of a call, in the order of the op's arguments."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_descale: Optional[Tensor] = None
    k_descale: Optional[Tensor] = None
    v_descale: Optional[Tensor] = None

    @property
    def descales(self) -> dict:
        """By their letters, those that are given."""
        found = dict(zip("qkv", self[3:], strict=True))
        return {name: x for name, x in found.items() if x is not None}

    @property
    def keys_contiguous(self) -> bool:
        """Are v's keys contiguous, and not its columns?"""
        return self.v.stride(3) != 1


class Options(NamedTuple):
    """left, right: -1 without a limit; causal means a right of 0."""

    causal: bool = False
    softmax_scale: Optional[float] = None
    left: int = -1
    right: int = -1
    accumulate: str = "two_level"
    out_dtype: torch.dtype = torch.bfloat16
    return_lse: bool = False


def check_options(options: Options) -> None:
    """Of the op, whose arguments come past the public function."""
    flags(options.causal, options.return_lse)
    numbers(options.softmax_scale)
    limits((options.left, options.right))
    words(options.accumulate, options.out_dtype)


def check_call(call: Call) -> None:
    """Raises what flash_attn_fp8 promises of its tensors."""
    q, k, v, *descales = call
    _tensors(*call)
    for name, x in (("q", q), ("k", k), ("v", v)):
        check.rank(f"{OP}: {name}", x, 4)
    check.same_device(**call._asdict())
    B, _, H, D = q.shape
    try:
        Fp8Spec(D)
    except NotImplementedError as problem:
        raise NotImplementedError(f"{problem}: q is {tuple(q.shape)}") from None
    check.shape(f"{OP}: k", k, (B, None, None, D))
    check.shape(f"{OP}: v", v, tuple(k.shape))
    heads = k.shape[2]
    if H and (not heads or H % heads):
        raise ValueError(f"{OP}: q has {H} heads, k has {heads}; q's must be a multiple of k's")
    for name, x in zip(("q_descale", "k_descale", "v_descale"), descales, strict=True):
        if x is not None:
            check.shape(f"{OP}: {name}", x, (B, heads))


def check_layouts(call: Call) -> None:
    """What TMA, and loads of 16 bytes, cannot take: strides and addresses."""
    for name, x in (("q", call.q), ("k", call.k), ("v", call.v)):
        if not x.numel():
            continue
        line = 1 if name == "v" and call.keys_contiguous else 3
        if x.stride(line) != 1 and x.shape[line] > 1:
            others = ", or its dimension of keys" if name == "v" else ""
            raise ValueError(f"{OP}: {name} has strides {x.stride()}; its last dimension{others} must be contiguous: "
                             "call .contiguous()")
        for i in range(4):
            if i != line and x.stride(i) % VECTOR and x.shape[i] > 1:
                raise ValueError(f"{OP}: {name} has strides {x.stride()}; stride {i} must be a multiple of {VECTOR} "
                                 "elements (16 bytes): call .contiguous()")
        if not x.is_meta and x.data_ptr() % 16:
            raise ValueError(f"{OP}: {name} begins at an address that is not a multiple of 16 bytes: call .clone()")


def spec_of(call: Call, options: Options, long_window: int) -> Fp8Spec:
    """long_window: from where on a limit on the left is far."""
    left, right = options.left >= 0, options.right >= 0
    return Fp8Spec(call.q.shape[3], options.causal, options.return_lse, dtypes.name_of(options.out_dtype),
                   options.accumulate, "".join(call.descales), left, right, left and options.left >= long_window)
