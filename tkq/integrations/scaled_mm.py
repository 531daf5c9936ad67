"""torch.nn.functional.scaled_mm on tkq.fp8_gemm: the same signature and meaning, for swapping in."""
from typing import Optional, Union

import torch
from torch import Tensor
from torch.nn import functional as F

from ..gemm.fp8_ops import fp8_gemm
from ..gemm.fp8_spec import GROUP
from ..runtime import check

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


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
        swizzle_a, swizzle_b: NO_SWIZZLE, or None.
        bias: (N,). output_dtype: None means mat_a's. contraction_dim: (), or (1, 0) in other words.
        use_fast_accum: False adds up sums of 128 of K in float32. Scales of blocks always do.

    Raises:
        What `tkq.fp8_gemm` does; NotImplementedError: recipes, swizzles and dimensions other than these.
    """
    scale_a, scale_b = _one("scale_a", scale_a), _one("scale_b", scale_b)
    for name, x in (("mat_a", mat_a), ("mat_b", mat_b), ("scale_a", scale_a), ("scale_b", scale_b)):
        check.tensor(name, x)
    for name, x in (("mat_a", mat_a), ("mat_b", mat_b)):
        check.rank(name, x, 2)
    recipes = _named("scale_recipe_a", scale_recipe_a), _named("scale_recipe_b", scale_recipe_b)
    for name, swizzle in (("swizzle_a", swizzle_a), ("swizzle_b", swizzle_b)):
        if swizzle is not None and _named(name, swizzle, "SwizzleType") != "NO_SWIZZLE":
            raise NotImplementedError(f"{name}: got {swizzle}, supported is NO_SWIZZLE")
    if not isinstance(contraction_dim, (list, tuple)) or tuple(d % 2 for d in contraction_dim) not in ((), (1, 0)):
        raise NotImplementedError(f"contraction_dim: got {contraction_dim}, supported are () and (1, 0)")
    scale_a, scale_b = _scales(mat_a, mat_b, scale_a, scale_b, recipes)
    blocks = recipes[0].startswith("Block")
    output_dtype = output_dtype or mat_a.dtype
    out_scale = torch.ones(1, device=mat_a.device) if output_dtype in _FP8 else None
    return fp8_gemm(mat_a, mat_b, scale_a, scale_b, bias=bias, out_dtype=output_dtype, out_scale=out_scale,
                    accumulate="fast" if use_fast_accum and not blocks else "fp32")


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


def _blocks(name, scale, lines, k, recipe, square):
    """(lines, ceil(K / 128)) scales, or where ``square`` (lines / 128, ..). torch pads a square operand's K to 4."""
    steps, tall = -(-k // GROUP), recipe == "BlockWise128x128"
    rows = -(-lines // GROUP) if tall else lines
    padded = -(-steps // 4) * 4
    _expect(name, scale, (rows, steps), scale.dim() == 2 and scale.shape[0] == rows and
            (scale.shape[1] == steps or (tall and scale.shape[1] == padded)))
    scale = scale[:, :steps]
    return scale.repeat_interleave(GROUP, 0)[:lines] if tall and not square else scale


def _expect(name, scale, shape, fits):
    if not fits:
        raise ValueError(f"{name}: shape is {tuple(scale.shape)}, its recipe wants {shape} (of a transposed b)"
                         if name == "scale_b" else f"{name}: shape is {tuple(scale.shape)}, its recipe wants {shape}")
