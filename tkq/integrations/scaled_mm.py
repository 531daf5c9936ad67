"""torch.nn.functional.scaled_mm on tkq.fp8_gemm: the same signature and meaning, for swapping in."""
from typing import Optional, Union

import torch
from torch import Tensor
from torch.nn import functional as F

from ..gemm.fp8.ops import Names, fp8_gemm, refusal
from ..gemm.fp8.spec import FP8, GROUP, OUT
from ..runtime.call import check, dtypes

_NAMES = Names("scaled_mm", "mat_a", "mat_b")
_ALONG_K = ((), *((a, b) for a in (1, -1) for b in (0, -2)))  # of mat_a and mat_b


def scaled_mm(mat_a: Tensor, mat_b: Tensor, scale_a: Union[Tensor, list[Tensor]],
              scale_recipe_a: "Union[F.ScalingType, list[F.ScalingType]]", scale_b: Union[Tensor, list[Tensor]],
              scale_recipe_b: "Union[F.ScalingType, list[F.ScalingType]]",
              swizzle_a: "Union[F.SwizzleType, list[F.SwizzleType], None]" = None,
              swizzle_b: "Union[F.SwizzleType, list[F.SwizzleType], None]" = None, bias: Optional[Tensor] = None,
              output_dtype: Optional[torch.dtype] = torch.bfloat16, contraction_dim: Union[list[int], tuple] = (),
              use_fast_accum: bool = False) -> Tensor:
    """(mat_a * scale_a) @ (mat_b * scale_b) + bias, as `torch.nn.functional.scaled_mm`.

    Args:
        mat_a: (M, K), float8, row-major. mat_b: (K, N), float8, column-major.
        scale_a, scale_b: float32, alone or as a list of one. scale_recipe_a, scale_recipe_b: what they mean:
            TensorWise with TensorWise; RowWise with RowWise; BlockWise1x128 or BlockWise128x128 with either, but for
            BlockWise128x128 with itself.
        swizzle_a, swizzle_b: NO_SWIZZLE, alone or as a list of one; None, or an empty list.
        bias: (N,). output_dtype: bfloat16, float16, float32 or float8_e4m3fn; None means mat_a's.
        contraction_dim: (), or (1, 0) in other words.
        use_fast_accum: False adds up sums of 128 of K in float32. BlockWise1x128 and BlockWise128x128 always do.

    Raises:
        What `tkq.fp8_gemm` does; NotImplementedError: recipes, swizzles, output_dtypes and dimensions other than these.
    """
    scale_a, scale_b = _one("scale_a", scale_a), _one("scale_b", scale_b)
    for name, x in (("mat_a", mat_a), ("mat_b", mat_b), ("scale_a", scale_a), ("scale_b", scale_b)):
        check.tensor(name, x)
    for name, x in (("mat_a", mat_a), ("mat_b", mat_b)):
        check.dtype(name, x, FP8)
        check.rank(name, x, 2)
    recipes = _named("scale_recipe_a", scale_recipe_a), _named("scale_recipe_b", scale_recipe_b)
    for name, swizzle in (("swizzle_a", swizzle_a), ("swizzle_b", swizzle_b)):
        if swizzle is not None and swizzle != [] and _named(name, swizzle, "SwizzleType") != "NO_SWIZZLE":
            raise NotImplementedError(f"{name}: got {swizzle}, supported is NO_SWIZZLE")
    _along_k(contraction_dim)
    check.flag("use_fast_accum", use_fast_accum)
    scale_a, scale_b = _scales(mat_a, mat_b, scale_a, scale_b, recipes)
    blocks = recipes[0].startswith("Block")
    output_dtype = _output_dtype(mat_a.dtype if output_dtype is None else output_dtype)
    out_scale = torch.ones(1, device=mat_a.device) if output_dtype.itemsize == 1 else None
    accumulate = "fast" if use_fast_accum and not blocks else "fp32"
    try:
        return fp8_gemm(mat_a, mat_b, scale_a, scale_b, bias=bias, out_dtype=output_dtype, out_scale=out_scale,
                        accumulate=accumulate)
    except (TypeError, ValueError) as error:  # it names fp8_gemm's arguments, which are not this function's
        call = mat_a, mat_b, scale_a, scale_b, bias, None, output_dtype, out_scale, accumulate
        raise refusal(call, _NAMES) or error from None


def _along_k(dims):
    """contraction_dim, as torch takes it."""
    if isinstance(dims, (list, tuple)) and any(type(d) is not int for d in dims):
        raise TypeError(f"contraction_dim: got {dims!r}, expected ints")
    if not isinstance(dims, (list, tuple)) or tuple(dims) not in _ALONG_K:
        raise NotImplementedError(f"contraction_dim: got {dims!r}, supported are () and (1, 0)")


def _output_dtype(dtype):
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"output_dtype: got {dtype!r}, expected a torch.dtype or None")
    if dtypes.name_of(dtype) not in OUT:
        raise NotImplementedError(f"output_dtype: got {dtype} (None is mat_a's), supported are "
                                  f"{', '.join(str(dtypes.torch_type(x)) for x in OUT)}")
    return dtype


def _one(name, given):
    """The only element of a list, or what is not a list."""
    if not isinstance(given, (list, tuple)):
        return given
    if len(given) != 1:
        raise NotImplementedError(f"{name}: got {len(given)} of them, supported is one")
    return given[0]


def _named(name, given, kind="ScalingType"):
    """The name of the only one."""
    one = _one(name, given)
    if not hasattr(one, "name"):
        raise TypeError(f"{name}: got {one!r}, expected a torch.nn.functional.{kind}")
    return one.name


def _scales(a, b, scale_a, scale_b, recipes):
    """Scales in the shapes that fp8_gemm knows, of what the recipes say they are."""
    if recipes == ("TensorWise", "TensorWise"):
        _expect("scale_a", scale_a, (1, 1), scale_a.numel() == 1)
        _expect("scale_b", scale_b, (1, 1), scale_b.numel() == 1)
        return scale_a.reshape(1), scale_b.reshape(1)
    (m, k), n = a.shape, b.shape[1]
    if recipes == ("RowWise", "RowWise"):
        _expect("scale_a", scale_a, (m, 1), scale_a.numel() == m)
        _expect("scale_b", scale_b, (1, n), scale_b.numel() == n)
        return scale_a.reshape(m, 1), scale_b.reshape(1, n)
    if set(recipes) <= {"BlockWise1x128", "BlockWise128x128"} and recipes != ("BlockWise128x128",) * 2:
        return (_blocks("scale_a", scale_a, m, k, recipes[0], False),
                _blocks("scale_b", scale_b.mT if scale_b.dim() > 1 else scale_b, n, k, recipes[1],
                        recipes[0] == "BlockWise1x128").t())
    raise NotImplementedError(f"scale_recipe_a, scale_recipe_b: got {' and '.join(recipes)}; supported are TensorWise "
                              "and RowWise, both operands alike, and BlockWise1x128 with itself or BlockWise128x128")


def _blocks(name, scale, rows, k, recipe, square):
    """(rows, ceil(K / 128)) scales, or where ``square`` (rows / 128, ..). torch pads a square operand's K to 4."""
    steps, tall = -(-k // GROUP), recipe == "BlockWise128x128"
    down = -(-rows // GROUP) if tall else rows
    padded = -(-steps // 4) * 4
    _expect(name, scale, (down, steps), scale.dim() == 2 and scale.shape[0] == down and
            (scale.shape[1] == steps or (tall and scale.shape[1] == padded)))
    scale = scale[:, :steps]
    return scale.repeat_interleave(GROUP, 0)[:rows] if tall and not square else scale


def _expect(name, scale, shape, fits):
    if not fits:
        raise ValueError(f"{name}: shape is {tuple(scale.shape)}, its recipe wants {shape} (of a transposed b)"
                         if name == "scale_b" else f"{name}: shape is {tuple(scale.shape)}, its recipe wants {shape}")
