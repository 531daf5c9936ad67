"""Multi-head latent attention over a paged cache in plain PyTorch: what it means."""
from torch import Tensor

from tkq.reference.decode import flash_attn_with_kvcache

VALUES = 512  # columns of a row that are values, too


def mla_decode(q: Tensor, kv_cache: Tensor, block_table: Tensor, cache_seqlens: Tensor, softmax_scale: float,
               causal: bool = True) -> tuple[Tensor, Tensor]:
    """o (B, Sq, H, 512) of q's dtype and lse (B, H, Sq) float32: attention with one K/V head, whose values are the
    first columns of its keys. See `tkq.mla_decode`."""
    k = kv_cache.unsqueeze(2) if kv_cache.dim() == 3 else kv_cache
    return flash_attn_with_kvcache(q, k, k[..., :VALUES], cache_seqlens, block_table, causal=causal,
                                   softmax_scale=softmax_scale)
