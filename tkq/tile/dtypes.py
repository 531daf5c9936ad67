"""Element types by name. Specs and plans know names only; here a name becomes a type of the DSL."""
from cutlass import BFloat16, Float8E4M3FN, Float8E5M2, Float16, Float32, Float64, Int32, Int64, Uint8

_TYPES = {"bf16": BFloat16, "fp16": Float16, "fp32": Float32, "fp64": Float64, "e4m3": Float8E4M3FN, "e5m2": Float8E5M2,
          "int32": Int32, "int64": Int64, "uint8": Uint8}
HALF = (BFloat16, Float16)
FP8 = (Float8E4M3FN, Float8E5M2)


def element_type(name: str):
    """The DSL's type for ``"bf16"``, ``"fp16"``, ``"fp32"``, ``"fp64"``, ``"e4m3"``, ``"e5m2"``, ``"int32"``,
    ``"int64"`` or ``"uint8"``.

    Raises:
        ValueError: another name.
    """
    if name not in _TYPES:
        raise ValueError(f"element_type: got {name!r}, allowed are {', '.join(_TYPES)}")
    return _TYPES[name]


def type_name(dtype) -> str:
    """``element_type`` the other way round; the type's own name where it has none here."""
    return next((name for name, known in _TYPES.items() if known is dtype), getattr(dtype, "__name__", str(dtype)))
