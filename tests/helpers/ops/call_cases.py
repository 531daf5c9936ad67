"""Eager calls of every op, by name, on tiny tensors: what a second call does beside a first one."""
import functools

import torch

import tkq
from tkq.attention.decode import words

BF16, F8, INT = torch.bfloat16, torch.float8_e4m3fn, torch.int32


def inputs(device):
    """Tensors by name. MLA's plan is made where it is first asked for: a bundle of other cases has no kernel for it."""
    generator = torch.Generator().manual_seed(1)

    def t(*shape, dtype=BF16):
        return torch.randint(-3, 4, shape, generator=generator).float().to(device=device, dtype=dtype)

    def ints(*values):
        return torch.tensor(values, dtype=INT, device=device)

    return dict(
        x=t(6, 64), w=t(64), wide=t(6, 80), qkv=t(2, 5, 3, 4, 64), cos=t(9, 32, dtype=torch.float32),
        q=t(2, 40, 8, 64), k=t(2, 50, 2, 64), v=t(2, 50, 2, 64), a=t(24, 64), b=t(64, 32), row=t(32), c=t(24, 32),
        a3=t(3, 24, 64), b3=t(3, 64, 32), many=t(2000, 64), heads=t(4, 64), sinks=t(8), a8=t(24, 64, dtype=F8),
        b8=t(32, 64, dtype=F8).t(), one=torch.ones(1, device=device), by_rows=torch.ones(24, 1, device=device),
        by_columns=torch.ones(1, 32, device=device), classes=ints(*range(6)), ends=ints(10, 24),
        classes_of_many=torch.zeros(2000, dtype=torch.long, device=device),
        ids=torch.zeros(2, 5, dtype=INT, device=device), cu=ints(0, 3, 40), used_q=ints(1, 2), used_k=ints(3, 4),
        long_k=ints(63, 64),
        w32=t(64, dtype=torch.float32), decays=-torch.arange(8, device=device) / 8.0,
        state=t(2, 8, 64, 64, dtype=torch.float32), gates=-t(2, 40, 8, dtype=torch.float32).abs() / 8,
        betas=t(2, 40, 8, dtype=torch.float32).sigmoid(), steps=t(2, 40, 8) / 4, keys=t(2, 40, 8, 64) / 16,
        columns=-t(2, 40, 8, 64, dtype=torch.float32).abs() / 8, map=t(8, 64, 32) / 8,
        factors=torch.full((8,), 0.5, device=device), taps=t(64, 4),
        windows=t(2, 64, 4), k_cache=t(2, 50, 2, 64), v_cache=t(2, 50, 2, 64), slots=ints(6, 99, -1, 20, 100, 34),
        q8=t(2, 40, 8, 64, dtype=F8), k8=t(2, 50, 2, 64, dtype=F8), v8=t(2, 50, 2, 64, dtype=F8),
        latent_q=t(2, 1, 8, 576), latent=t(5, 16, 576) / 16,
        latent_plan=functools.cache(lambda: tkq.plan_decode(ints(3, 4), 8, 1, 576, head_dim_v=512)))


def _onto(c, a, b):
    return tkq.gemm(a, b, c=c, beta=0.5, out=c)


def _appended(g):
    tkq.kv_append(g.k[0, :6], g.k[1, :6], g.k_cache, g.v_cache, g.slots)
    return g.k_cache, g.v_cache


def _descales(g):
    return {f"{x}_descale": g.factors[:4].view(2, 2) for x in "qkv"}


def cases(g):
    """{name: call} with such inputs, as attributes of g."""
    return {
        "rmsnorm": lambda: tkq.rmsnorm(g.x, g.w),
        "rmsnorm of one row": lambda: tkq.rmsnorm(g.w, g.w),
        "rmsnorm of three dimensions": lambda: tkq.rmsnorm(g.x.view(2, 3, 64), g.w),
        "rmsnorm of a view": lambda: tkq.rmsnorm(g.wide[:, 8:72], g.w),
        "rmsnorm of a view of three dimensions": lambda: tkq.rmsnorm(g.wide.view(2, 3, 80)[..., 8:72], g.w),
        "rmsnorm with a residual": lambda: tkq.rmsnorm(g.x, g.w, residual=g.x.float(), prenorm=True),
        "rmsnorm of three dimensions with a residual": lambda: tkq.rmsnorm(
            g.x.view(2, 3, 64), residual=g.x.view(2, 3, 64), prenorm=True),
        "rmsnorm of heads": lambda: tkq.rmsnorm(g.qkv[:, :, 1], g.heads),
        "rmsnorm of slices": lambda: tkq.rmsnorm(g.qkv[:, 1:4, 1], g.w),
        "layernorm": lambda: tkq.layernorm(g.x, g.w, g.w32),
        "layernorm in another type": lambda: tkq.layernorm(g.x, g.w, out_dtype=torch.float32),
        "rmsnorm_quant": lambda: tkq.rmsnorm_quant(g.x, g.w),
        "layernorm_quant by blocks": lambda: tkq.layernorm_quant(g.x.view(3, 2, 64), granularity="1x128"),
        "softmax": lambda: tkq.softmax(g.x),
        "log_softmax of three dimensions": lambda: tkq.log_softmax(g.x.view(2, 3, 64), scale=2.0),
        "cross_entropy, none": lambda: tkq.cross_entropy(g.x, g.classes, reduction="none"),
        "cross_entropy, mean": lambda: tkq.cross_entropy(g.x, g.classes),
        "cross_entropy of three dimensions": lambda: tkq.cross_entropy(
            g.x.view(2, 3, 64), g.classes.view(2, 3), reduction="none"),
        "cross_entropy, sum of many rows": lambda: tkq.cross_entropy(
            g.many, g.classes_of_many, weight=g.w, reduction="sum", label_smoothing=0.1),
        "cross_entropy_and_gradient": lambda: tkq.cross_entropy_and_gradient(g.x, g.classes),
        "swiglu": lambda: tkq.swiglu(g.x, g.x),
        "swiglu of views": lambda: tkq.swiglu(g.wide[:, :64], g.wide[:, 16:]),
        "swiglu of three dimensions": lambda: tkq.swiglu(g.x.view(2, 3, 64), g.x.view(2, 3, 64)),
        "geglu of one tensor": lambda: tkq.geglu(g.x, layout="interleaved"),
        "rope": lambda: tkq.rope(g.qkv[:, :, 0], g.cos, g.cos, seqlen_offsets=2),
        "rope, interleaved": lambda: tkq.rope(g.qkv[:, :, 0].contiguous(), g.cos, g.cos, interleaved=True),
        "rope in place": lambda: tkq.rope(g.qkv[:, :, 0].contiguous(), g.cos, g.cos, inplace=True),
        "rope in place of a part": lambda: tkq.rope(
            g.qkv.flatten(3)[..., :192].reshape(2, 5, 6, 96), g.cos, g.cos, inplace=True),
        "rope in place of a slice": lambda: tkq.rope(g.qkv[:, :, 0], g.cos, g.cos, inplace=True),
        "rope_qk": lambda: tkq.rope_qk(g.qkv[:, :, 0], g.qkv[:, :, 1, :2], g.cos, g.cos),
        "rope with ids": lambda: tkq.rope(g.qkv[:, :, 0], g.cos, g.cos, position_ids=g.ids),
        "flash_attn": lambda: tkq.flash_attn(g.q, g.k, g.v),
        "flash_attn with options": lambda: tkq.flash_attn(
            g.q, g.k, g.v, causal=True, window_size=(7, 0), softcap=3.0, softmax_scale=0.5, sinks=g.sinks,
            return_lse=True),
        "flash_attn with a window": lambda: tkq.flash_attn(g.q, g.k, g.v, window_size=(100, 3)),
        "flash_attn_varlen": lambda: tkq.flash_attn_varlen(
            g.q[0], g.k[0], g.v[0], g.cu, g.cu, 40, 50, causal=True, return_lse=True),
        "flash_attn_varlen in use": lambda: tkq.flash_attn_varlen(
            g.q[0], g.k[0], g.v[0], g.cu, g.cu, 40, 50, seqused_q=g.used_q, seqused_k=g.used_k),
        "linear_attn": lambda: tkq.linear_attn(g.q[..., :2, :], g.q[..., 2:4, :], g.q),
        "linear_attn with states": lambda: tkq.linear_attn(
            g.q, g.q, g.q, g.decays, 0.5, initial_state=g.state, output_final_state=True),
        "gated_delta_rule": lambda: tkq.gated_delta_rule(g.q[..., :2, :], g.keys[..., :2, :], g.q, g.gates, g.betas),
        "gated_delta_rule of a layer": lambda: tkq.gated_delta_rule(
            g.q, g.q, g.q, g.gates, g.betas, use_qk_l2norm_in_kernel=True, A_log=g.decays, dt_bias=g.decays,
            use_gate_in_kernel=True, allow_neg_eigval=True),
        "gated_delta_rule with states": lambda: tkq.gated_delta_rule(
            g.q, g.keys, g.q, g.gates, g.betas, 0.5, initial_state=g.state, output_final_state=True),
        "linear_attn with gates of columns": lambda: tkq.linear_attn(g.q, g.q, g.q, g.columns),
        "gated_delta_rule with gates of columns": lambda: tkq.gated_delta_rule(
            g.q, g.keys, g.q, g.columns, g.betas),
        "mamba2_ssd": lambda: tkq.mamba2_ssd(
            g.q, g.steps, g.decays, g.keys, g.keys, D=g.decays, dt_bias=g.decays, dt_softplus=True),
        "mamba2_ssd with states": lambda: tkq.mamba2_ssd(
            g.q, g.steps, g.decays, g.keys[..., :2, :], g.keys[..., :2, :], g.decays, g.q, g.decays, g.state, True,
            dt_limit=(0.1, 0.5), return_final_states=True),
        "linear_attn of packed sequences": lambda: tkq.linear_attn(
            g.q[:1], g.q[:1], g.q[:1], g.gates[:1], initial_state=g.state, cu_seqlens=g.cu, state_v_first=True,
            output_final_state=True),
        "linear_attn with a pool": lambda: tkq.linear_attn(
            g.q[:1], g.q[:1], g.q[:1], g.gates[:1], 0.5, initial_state=g.state.clone(), cu_seqlens=g.cu,
            output_final_state=True, state_indices=g.used_q),
        "gated_delta_rule of packed sequences": lambda: tkq.gated_delta_rule(
            g.q[:1], g.keys[:1], g.q[:1], g.gates[:1], g.betas[:1], initial_state=g.state, cu_seqlens=g.cu,
            output_final_state=True),
        "gated_delta_rule with a pool": lambda: tkq.gated_delta_rule(
            g.q[:1], g.keys[:1], g.q[:1], g.gates[:1], g.betas[:1], initial_state=g.state.clone(), cu_seqlens=g.cu,
            state_indices=g.used_q, output_final_state=True),
        "linear_attn of packed gates of columns": lambda: tkq.linear_attn(
            g.q[:1], g.q[:1], g.q[:1], g.columns[:1], initial_state=g.state, cu_seqlens=g.cu,
            output_final_state=True),
        "gated_delta_rule with a pool and gates of columns": lambda: tkq.gated_delta_rule(
            g.q[:1], g.keys[:1], g.q[:1], g.columns[:1], g.betas[:1], initial_state=g.state.clone(), cu_seqlens=g.cu,
            state_indices=g.used_q, output_final_state=True),
        "mamba2_ssd of packed sequences": lambda: tkq.mamba2_ssd(
            g.q[:1], g.steps[:1], g.decays, g.keys[:1], g.keys[:1], D=g.decays, initial_states=g.state,
            dt_softplus=True, cu_seqlens=g.cu, return_final_states=True),
        "mamba2_ssd with a pool": lambda: tkq.mamba2_ssd(
            g.q[:1], g.steps[:1], g.decays, g.keys[:1], g.keys[:1], D=g.decays, initial_states=g.state.clone(),
            dt_softplus=True, cu_seqlens=g.cu, state_indices=g.used_q, return_final_states=True),
        "hedgehog": lambda: tkq.hedgehog(g.q, g.keys, g.q, g.map, g.map, g.factors, g.factors),
        "based": lambda: tkq.based(g.q[..., :2, :16], g.keys[..., :2, :16], g.q),
        "based without a norm": lambda: tkq.based(g.q[..., :16], g.keys[..., :16], g.q, 0.5, use_norm=False),
        "causal_conv1d": lambda: tkq.causal_conv1d(g.q[:, :, 0], g.taps),
        "causal_conv1d of packed sequences with states": lambda: tkq.causal_conv1d(
            g.q[:1, :, 0], g.taps, g.w, "silu", g.state[:, 0, :, :3], cu_seqlens=g.cu),
        "causal_conv1d of contiguous tokens": lambda: tkq.causal_conv1d(g.wide.view(1, 6, 80).mT, g.taps[:6]),
        "scan": lambda: tkq.scan(g.q[:, :, 0], g.keys[:, :, 0]),
        "scan of contiguous tokens, backwards, with states": lambda: tkq.scan(
            g.wide.view(1, 6, 80).mT, g.wide.view(1, 6, 80).mT, g.factors[:6].view(1, 6), True, True),
        "fft_conv": lambda: tkq.fft_conv(g.q[:, :, 0], g.columns[0, :, 0]),
        "causal_conv1d_step": lambda: tkq.causal_conv1d_step(
            g.q[:, 0, 0], g.windows, g.taps, g.w, "silu", g.cu[:2]),
        "quantize_qkv": lambda: tkq.quantize_qkv(g.q, g.k, g.k),
        "flash_attn_fp8": lambda: tkq.flash_attn_fp8(
            g.q8, g.k8, g.v8, **_descales(g), causal=True, return_lse=True),
        "flash_attn_fp8_varlen": lambda: tkq.flash_attn_fp8_varlen(
            g.q8[0], g.k8[0], g.v8[0], g.cu, g.cu, 40, 50, **_descales(g), causal=True, return_lse=True),
        "flash_attn_fp8_varlen of pages": lambda: tkq.flash_attn_fp8_varlen(
            g.q8[0], g.k8, g.v8, g.cu, None, 40, 50, k_descale=g.factors[:4].view(2, 2), seqused_k=g.used_k,
            block_table=g.ids[:, :2].contiguous()),
        "flash_attn_with_kvcache": lambda: tkq.flash_attn_with_kvcache(
            g.q[:, :1], g.k, g.v, cache_seqlens=g.used_k),
        "flash_attn_with_kvcache of pages": lambda: tkq.flash_attn_with_kvcache(
            g.q[:, :2], g.k, g.v, cache_seqlens=g.used_k, block_table=g.ids[:, :2].contiguous(), return_lse=True),
        "flash_attn_with_kvcache of float8": lambda: tkq.flash_attn_with_kvcache(
            g.q[:, :1], g.k.to(torch.float8_e4m3fn), g.v.to(torch.float8_e4m3fn), cache_seqlens=g.used_k,
            k_descale=g.factors[:2], v_descale=g.factors[:2]),
        "flash_attn_with_kvcache of ragged queries": lambda: tkq.flash_attn_with_kvcache(
            g.q[0], g.k, g.v, cache_seqlens=g.used_k, cu_seqlens_q=g.cu),
        "cascade_attention": lambda: tkq.cascade_attention(
            g.q[:, :1], g.k, g.v, block_table=g.ids, cache_seqlens=g.long_k, prefix_len=55, cascade=True),
        "mla_decode": lambda: tkq.mla_decode(
            g.latent_q, g.latent, g.ids, g.used_k, softmax_scale=0.1, return_lse=True),
        "mla_decode, planned": lambda: tkq.mla_decode(
            g.latent_q, g.latent, g.ids, g.used_k, softmax_scale=0.1, plan=g.latent_plan(), return_lse=True),
        "mla_decode of lists, planned": lambda: tkq.mla_decode(
            g.latent_q, g.latent, softmax_scale=0.1, indices=g.ids[:, None], topk_length=g.used_k,
            plan=g.latent_plan()),
        "mla_decode of lists": lambda: tkq.mla_decode(
            g.latent_q, g.latent, softmax_scale=0.1, indices=g.ids[:, None], topk_length=g.used_k),
        # behind the header and the parts, which depend on how many multiprocessors there are
        "plan_decode": lambda: tkq.plan_decode(g.used_k, 8, 2, 64)[words.LENGTHS:],
        "kv_append": lambda: _appended(g),
        "merge_state": lambda: tkq.merge_state(g.q, g.betas.mT, g.keys, g.gates.mT),
        "linear_attn_step": lambda: tkq.linear_attn_step(
            g.q[:, :1, :2], g.keys[:, :1, :2], g.q[:, :1], g.gates[:, :1], g.state),
        "linear_attn_step of several tokens": lambda: tkq.linear_attn_step(
            g.q[:, :3], g.keys[:, :3], g.q[:, :3], g.decays, g.state, 0.5, g.cu[:2]),
        "gated_delta_rule_step": lambda: tkq.gated_delta_rule_step(
            g.q[:, :1, :2], g.keys[:, :1, :2], g.q[:, :1], g.gates[:, :1], g.betas[:, :1], g.state, None, True,
            g.used_q),
        "ssd_step": lambda: tkq.ssd_step(
            g.state, g.q[:, 0], g.betas[:, 0], g.decays, g.keys[:, 0, :2], g.keys[:, 1, :2], dt_softplus=True),
        "gemm": lambda: tkq.gemm(g.a, g.b),
        "gemm of views": lambda: tkq.gemm(g.wide[:, 1:65], g.b[:, :31]),
        "gemm with an epilogue": lambda: tkq.gemm(g.a, g.b, bias=g.row, activation="silu", alpha=2.0),
        "gemm with c": lambda: tkq.gemm(g.a, g.b, c=g.c, beta=0.5, out_dtype=torch.bfloat16),
        "gemm, gated": lambda: tkq.gemm(g.a, g.b, activation="swiglu"),
        "gemm in float32": lambda: tkq.gemm(g.a.t().contiguous().t(), g.b, out_dtype=torch.float32),
        "gemm of a batch": lambda: tkq.gemm(g.a3, g.b3),
        "gemm into out": lambda: tkq.gemm(g.a, g.b, out=torch.empty_like(g.c)),
        "gemm onto c": lambda: _onto(g.c.clone(), g.a, g.b),
        "gemm of a batch that shares": lambda: tkq.gemm(g.a3, g.b.expand(3, 64, 32)),
        "fp8_gemm": lambda: tkq.fp8_gemm(g.a8, g.b8, g.one, g.one),
        "fp8_gemm by rows": lambda: tkq.fp8_gemm(g.a8, g.b8, g.by_rows, g.by_columns, bias=g.row),
        "grouped_gemm": lambda: tkq.grouped_gemm(g.a, g.b3[:2], g.ends),
        "grouped_gemm, gradient": lambda: tkq.grouped_gemm(g.a.t(), g.c, g.ends),
        "quantize_fp8": lambda: tkq.quantize_fp8(g.x),
        "quantize_fp8 with the transpose": lambda: tkq.quantize_fp8(g.x, "1x128", transpose=True),
        "quantize_fp8 by rows with the transpose": lambda: tkq.quantize_fp8(g.x, "row", transpose=True),
        "quantize_fp8, tensor": lambda: tkq.quantize_fp8(g.x, "tensor"),
    }
