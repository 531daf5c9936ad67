"""vLLM's attention on `tkq.flash_attn_with_kvcache`: bf16 and fp16, decoder layers, GQA, windows, softcap, sinks.

New keys and values go into the paged cache by `tkq.kv_append`. Sequences with one token, and batches in which all have
as many, are one launch, whose plan is made once a step for all layers, into the same memory at each step: full CUDA
graphs may be captured of them. vLLM brings sequences with one token to the front of a batch; the prompts behind them
are a second launch, of ragged queries.

The cache is vLLM's (blocks, heads, block size, 2 D), keys and values side by side; the kernels take views of it.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from vllm import envs
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

from tkq import flash_attn_with_kvcache, kv_append, plan_decode

from .vllm import NAME

__all__ = ["TkqAttention", "TkqBackend", "TkqMetadata", "TkqMetadataBuilder"]

HEAD_SIZES = [64, 96, 128, 192, 256]
HOPPER = 9, 0


class TkqBackend(AttentionBackend):
    """What vLLM asks before it takes a backend."""

    supported_dtypes: ClassVar = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls():
        return TkqAttention

    @staticmethod
    def get_builder_cls():
        return TkqMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        return [MultipleOf(1)]

    @classmethod
    def get_supported_head_sizes(cls):
        return HEAD_SIZES

    @classmethod
    def supports_compute_capability(cls, capability) -> bool:
        return (capability.major, capability.minor) == HOPPER

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True


def window_of(sliding_window, causal: bool) -> tuple:
    """tkq's (left, right) of vLLM's window, which counts the query itself; on both sides where not causal."""
    if sliding_window is None:
        return None, None
    return sliding_window - 1, None if causal else sliding_window - 1


@dataclass(frozen=True)
class Launch:
    """Sequences of a batch, and their tokens. queries: tokens of each; 0 where starts, (sequences + 1,) int32, says
    where those of each begin. plan: for layers with the group's window; None for one that is made at each call."""

    sequences: slice
    tokens: slice
    queries: int
    plan: Tensor | None = None
    starts: Tensor | None = None

    def shape(self, heads: int, columns: int) -> tuple:
        """Of the queries, and of the result."""
        tokens = self.tokens.stop - self.tokens.start
        return (tokens // self.queries, self.queries, heads, columns) if self.queries else (tokens, heads, columns)


@dataclass
class TkqMetadata(AttentionMetadata):
    """Of a step, for all layers of a group. seq_lens: (B,) int32, keys of each sequence with the new ones; block_table:
    (B, n) int32; slot_mapping: where new keys go; causal: a bool; window: that of the plans, as `window_of` has it."""

    num_actual_tokens: int
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    causal: bool
    window: tuple
    launches: tuple[Launch, ...]


class TkqMetadataBuilder(AttentionMetadataBuilder):
    """Plans a step. Plans lie in memory that stays: a captured graph reads what the next `build` wrote there."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        self.sizes = (model.get_num_attention_heads(parallel), kv_cache_spec.num_kv_heads, kv_cache_spec.head_size)
        self.window = getattr(kv_cache_spec, "sliding_window", None)
        self.plans = {}  # (sequences, queries, window) -> plan

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False) -> TkqMetadata:
        common = common_attn_metadata
        if isinstance(common.causal, Tensor):
            raise NotImplementedError(f"{NAME}: causal is a tensor, a bool for each sequence: supported is one for all")
        lengths = common.query_start_loc_cpu.diff().tolist()[:common.num_reqs]
        window = window_of(self.window, common.causal)
        return TkqMetadata(common.num_actual_tokens, common.seq_lens, common.block_table_tensor, common.slot_mapping,
                           common.causal, window, tuple(self._launches(common, lengths, window)))

    def _launches(self, common, lengths, window):
        """Sequences in front that have as many tokens, by one launch if these are few; the others by another."""
        queries = lengths[0] if lengths else 0
        alike = next((i for i, n in enumerate(lengths) if n != queries), len(lengths))
        if not 0 < queries <= self.reorder_batch_threshold:
            alike = 0
        # The rest of a padded batch has no tokens, and no keys: it goes along, so that a graph's sizes are the batch's.
        padded = alike and not any(lengths[alike:]) and common.num_actual_tokens == common.num_reqs * queries
        end = common.num_reqs if padded else alike
        token = end * queries
        if end:
            yield Launch(slice(0, end), slice(0, token), queries, self._plan(common.seq_lens[:end], queries, window))
        if not common.causal:  # ragged queries are causal
            for i in range(end, len(lengths)):
                if lengths[i]:
                    yield Launch(slice(i, i + 1), slice(token, token + lengths[i]), lengths[i])
                    token += lengths[i]
        elif sum(lengths[end:]):
            sequences, total = slice(end, len(lengths)), sum(lengths[end:])
            starts = common.query_start_loc[end:len(lengths) + 1] - token
            plan = plan_decode(common.seq_lens[sequences], *self.sizes, window_size=window, cu_seqlens_q=starts,
                               total_q=total, batch_invariant=bool(envs.VLLM_BATCH_INVARIANT))
            yield Launch(sequences, slice(token, token + total), 0, plan, starts)

    def _plan(self, seq_lens, queries, window):
        key = len(seq_lens), queries, window
        self.plans[key] = plan_decode(seq_lens, *self.sizes, max_seqlen_q=queries, window_size=window,
                                      out=self.plans.get(key), batch_invariant=bool(envs.VLLM_BATCH_INVARIANT))
        return self.plans[key]


class TkqAttention(AttentionImpl):
    """A layer. Refused by name: ALiBi, caches of float8, encoders, fused quantisation of the output."""

    def __init__(self, num_heads, head_size, scale, num_kv_heads=None, alibi_slopes=None, sliding_window=None,
                 kv_cache_dtype="auto", logits_soft_cap=None, attn_type=AttentionType.DECODER,
                 kv_sharing_target_layer_name=None, sinks=None):
        for name, got, allowed in (("alibi_slopes", alibi_slopes, (None,)),
                                   ("attn_type", attn_type, (AttentionType.DECODER,)),
                                   ("kv_cache_dtype", kv_cache_dtype, TkqBackend.supported_kv_cache_dtypes),
                                   ("head_size", head_size, HEAD_SIZES)):
            if got not in allowed:
                raise NotImplementedError(f"{NAME}: {name} is {got!r}, supported are {', '.join(map(repr, allowed))}")
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads or num_heads, head_size
        self.kv_cache_dtype, self.kv_sharing_target_layer_name = kv_cache_dtype, kv_sharing_target_layer_name
        self.sliding_window = sliding_window
        self.scale, self.options = float(scale), dict(softmax_scale=float(scale), softcap=logits_soft_cap or 0.0,
                                                      sinks=sinks, batch_invariant=bool(envs.VLLM_BATCH_INVARIANT))

    def caches(self, kv_cache):
        """(blocks, block size, Hk, D) of keys and of values."""
        return kv_cache.transpose(1, 2).split(self.head_size, -1)

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        """New keys and values into the cache. key and value may be padded behind slot_mapping's tokens."""
        n = len(slot_mapping)
        kv_append(key[:n], value[:n], *self.caches(kv_cache), slot_mapping)

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None,
                output_block_scale=None):
        """query (T, H, D); the result goes into output (T, H, D)."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError(f"{NAME}: output_scale or output_block_scale is given, supported is None")
        if attn_metadata is None:  # vLLM measures how much memory a step takes
            return output.fill_(0)
        k_cache, v_cache = self.caches(kv_cache)
        window = window_of(self.sliding_window, attn_metadata.causal)
        for one in attn_metadata.launches:
            shape = one.shape(*query.shape[1:])
            flash_attn_with_kvcache(
                query[one.tokens].view(shape), k_cache, v_cache, cache_seqlens=attn_metadata.seq_lens[one.sequences],
                block_table=attn_metadata.block_table[one.sequences], causal=attn_metadata.causal, window_size=window,
                plan=one.plan if window == attn_metadata.window else None, cu_seqlens_q=one.starts,
                out=output[one.tokens].view(shape), **self.options)
        return output
