"""Between torch's element types and the names that specs use."""
import torch

_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.uint8: "uint8",
}
_TYPES = {name: dtype for dtype, name in _NAMES.items()}


def name_of(dtype: torch.dtype) -> str:
    """``"bf16"`` of ``torch.bfloat16`` and so on; the type's own name, which no spec knows, of another."""
    return _NAMES.get(dtype) or str(dtype).removeprefix("torch.")


def names(*values) -> tuple:
    """`name_of` each, of tensors or torch types; None for None."""
    return tuple(None if x is None else name_of(x.dtype if isinstance(x, torch.Tensor) else x) for x in values)


def torch_type(name: str) -> torch.dtype:
    """The torch type of a name.

    Raises:
        ValueError: a name that tkq does not know.
    """
    if name not in _TYPES:
        raise ValueError(f"dtype: got {name!r}, allowed are {', '.join(_TYPES)}")
    return _TYPES[name]
