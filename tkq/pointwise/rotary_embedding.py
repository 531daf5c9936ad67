"""tkq.nn.RotaryEmbedding: the tables of a rotary embedding, and what rotates by them."""
import dataclasses
from typing import Optional

import torch
from torch import Tensor, nn

from ..runtime import arguments
from .rope_ops import rope_qk
from .rope_tables import rope_cos_sin
from .spec import MAX_ROTARY_DIM

_interleaved = arguments.checker("rope_qk", "interleaved", called="RotaryEmbedding")
_seqlen, _dim, _base = arguments.table("rope_cos_sin")[:3]
_tables = arguments.checker_of("RotaryEmbedding", _dim, dataclasses.replace(_seqlen, name="max_seqlen"), _base)


class RotaryEmbedding(nn.Module):
    """Rotates queries and keys by their positions, on `tkq.rope_qk`.

    dim: columns of a head that rotate. max_seqlen: positions that the tables have. base, interleaved: as `rope_cos_sin`
    and `rope_qk`. The tables, buffers `cos` and `sin`, are the module's own: no part of the state dict, float32, and of
    the same values when the module is moved or cast. A model whose layers rotate alike needs one module for all.
    """

    def __init__(self, dim: int, max_seqlen: int, base: float = 10000.0, *, interleaved: bool = False, device=None):
        super().__init__()
        dim, max_seqlen, base = _tables(dim, max_seqlen, base)
        if dim % 2:
            raise ValueError(f"RotaryEmbedding: dim: got {dim}, allowed are even numbers from 2 on")
        if dim > MAX_ROTARY_DIM:
            raise NotImplementedError(f"RotaryEmbedding: dim: got {dim}, supported are up to {MAX_ROTARY_DIM}")
        self.dim, self.max_seqlen, self.base, self.interleaved = dim, max_seqlen, base, _interleaved(interleaved)
        self._make(torch.get_default_device() if device is None else device)

    def reset_parameters(self) -> None:
        """Make the tables anew where they are, as FSDP asks of modules that come from the meta device."""
        self._make(self.cos.device)

    def _make(self, device):
        for name, table in zip(("cos", "sin"), rope_cos_sin(self.max_seqlen, self.dim, self.base, device=device)):
            self.register_buffer(name, table, persistent=False)

    def _apply(self, fn, recurse=True):
        before = self.cos, self.sin
        super()._apply(fn, recurse)
        if before[0].is_meta:
            self._make(self.cos.device)
        else:  # those from before: a cast would leave angles of 8 bits, and to_empty none
            self.cos, self.sin = (t.to(moved.device) for t, moved in zip(before, (self.cos, self.sin)))
        return self

    def forward(self, q: Tensor, k: Tensor, *, seqlen_offsets=0, position_ids: Optional[Tensor] = None,
                cu_seqlens: Optional[Tensor] = None) -> tuple[Tensor, Tensor]:
        """q, k: (B, S, H, D) and (B, S, Hk, D), or of packed sequences, as `tkq.rope_qk` has them."""
        return rope_qk(q, k, self.cos, self.sin, interleaved=self.interleaved, seqlen_offsets=seqlen_offsets,
                       position_ids=position_ids, cu_seqlens=cu_seqlens)

    def extra_repr(self) -> str:
        return f"{self.dim}, max_seqlen={self.max_seqlen}, base={self.base}, interleaved={self.interleaved}"
