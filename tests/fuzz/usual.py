"""Usual arguments of every operation, at random: what it must take. One seed gives one call."""
import random

import torch

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ALL_SEVEN = ("relu", "silu", "gelu", "gelu_tanh", "swiglu", "geglu_interleaved")


class Draw:
    """Random numbers, choices and tensors on one device.

    On a GPU (few) choices are narrow, as each new combination of types is a kernel to compile."""

    def __init__(self, device, seed):
        self.device, self.few = device, device != "cpu"
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def one(self, *values):
        return self.random.choice(values)

    def of(self, many, few):
        """One of ``many`` on the CPU, of ``few`` on a GPU."""
        return self.random.choice(few if self.few else many)

    def chance(self, p):
        return self.random.random() < p

    def maybe(self, p, make):
        return make() if self.chance(p) else None

    def normal(self, *shape, dtype=BF16, scale=1.0):
        return (torch.randn(shape, generator=self.generator) * scale).to(dtype).to(self.device)

    def positive(self, *shape):
        return self.normal(*shape, dtype=FP32).abs() + 0.1

    def integers(self, low, high, *shape, dtype=torch.int64):
        return torch.randint(low, high, shape, generator=self.generator).to(dtype).to(self.device)

    def int32(self, values):
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def half(self):
        return self.of((BF16, FP16), (BF16,))

    def real(self):
        return self.of((BF16, FP16, FP32), (BF16, FP32))

    def columns(self):
        return self.of((1, 7, 48, 64, 96, 200), (48, 64))

    def rows(self, none=(3,)):
        """The dimensions in front; ``none`` where there would be none."""
        return self.of(((5,), (2, 3), (), (1,), (0,), (2, 0, 3), (4, 1, 2)), ((5,), (2, 3), (0,))) or none


def softmax(d):
    x = d.normal(*d.rows(), d.columns(), dtype=d.real())
    first = (0,) if not d.few and x.numel() else ()
    return dict(x=x, dim=d.one(-1, -1, x.dim() - 1, *first), scale=d.one(1.0, 0.5, -2, 3))


def _loss_options(d, classes, weight):
    return {weight: d.maybe(0.25, lambda: d.normal(classes, dtype=FP32).abs()), "ignore_index": d.one(-100, 1, 0),
            "reduction": d.one("mean", "sum", "none"), "label_smoothing": d.one(0.0, 0.1, 1.0),
            "z_loss": d.one(0.0, 1e-3), "softcap": d.one(None, None, 5.0)}


def _labels(d, classes, rows, dtype=torch.int64):
    """At times with some outside the classes, on either side."""
    low, high = (-1, classes + 1) if d.chance(0.1) else (0, classes)
    return d.integers(low, high, *rows, dtype=dtype)


def cross_entropy(d):
    classes, rows = d.of((1, 5, 64, 100), (64,)), d.rows()
    return dict(logits=d.normal(*rows, classes, dtype=d.real()),
                target=_labels(d, classes, rows, d.one(torch.int64, torch.int32)),
                **_loss_options(d, classes, "weight"), inplace_backward=d.chance(0.2))


def cross_entropy_and_gradient(d):
    given = cross_entropy(d)
    del given["inplace_backward"]
    return {**given, "inplace": d.chance(0.2), "reduction": d.one("mean", "sum")}


def linear_cross_entropy(d):
    classes, rows, dtype = d.one(40, 96), d.one((5,), (2, 3)), d.half()
    return dict(x=d.normal(*rows, 64, dtype=dtype, scale=0.3), weight=d.normal(classes, 64, dtype=dtype, scale=0.3),
                target=_labels(d, classes, rows), **_loss_options(d, classes, "class_weight"))


def _norm(d):
    """The arguments that all norms share."""
    heads, n, dtype, prenorm = d.chance(0.15), d.columns(), d.real(), d.chance(0.3)
    rows = (2, 4) if heads else d.rows()
    vector = d.of((dtype, FP32), (FP32,))
    weight = d.maybe(0.8, lambda: d.normal(*rows[-1:] * heads, n, dtype=vector))
    of_heads = heads and weight is not None
    return dict(x=d.normal(*rows, n, dtype=dtype), weight=weight,
                bias=d.maybe(0.3, lambda: d.normal(*rows[-1:] * of_heads, n, dtype=vector)),
                eps=d.one(1e-6, 1e-5, 0.1), residual=d.maybe(0.3, lambda: d.normal(*rows, n, dtype=dtype)),
                prenorm=prenorm, weight_offset=0.0 if weight is None else d.one(0.0, 1.0),
                residual_dtype=d.one(None, FP32) if prenorm else None)


def norm(d):
    return dict(_norm(d), out_dtype=d.of((None, None, FP32, FP16), (None,)))


def norm_quant(d):
    return dict(_norm(d), granularity=d.one("row", "1x128"))


def quantize_fp8(d):
    x = d.normal(d.of((0, 1, 130, 16), (130, 16)), d.of((1, 128, 200), (128,)), dtype=d.real())
    return dict(x=x, granularity=d.one("tensor", "row", "1x128", "128x128"), dtype=d.of((E4M3, E5M2), (E4M3,)),
                transpose=d.chance(0.4))


def gemm(d):
    m, n, k = d.of((0, 1, 5, 64), (5, 64)), d.of((2, 32, 40), (32,)), d.of((0, 8, 64), (64,))
    batch, dtype = d.of(((), (), (3,)), ((),)), d.half()
    activation = d.of((None, None, *ALL_SEVEN), (None, "silu"))
    out_dtype, gated = d.one(None, None, FP32), bool(activation) and "glu" in activation
    shape = *batch, m, n // 2 if gated else n
    b = d.normal(*batch, n, k, dtype=dtype).mT if d.chance(0.5) else d.normal(*batch, k, n, dtype=dtype)
    c = None if gated else d.maybe(0.2, lambda: d.normal(*shape, dtype=out_dtype or dtype))
    return dict(a=d.normal(*batch, m, k, dtype=dtype), b=b,
                bias=d.maybe(0.3, lambda: d.normal(n, dtype=d.of((dtype, FP32), (FP32,)))), activation=activation, c=c,
                alpha=d.one(1.0, 0.5, -2), beta=0.0 if c is None else d.one(1.0, 0.5),
                out=d.maybe(0.15, lambda: d.normal(*shape, dtype=out_dtype or dtype)), out_dtype=out_dtype)


def fp8_gemm(d):
    m, n, k = d.of((1, 5, 130), (5, 130)), d.of((1, 32, 136), (136,)), d.of((16, 128, 272), (256,))
    k_blocks, n_blocks = -(-k // 128), -(-n // 128)
    scales = d.one(((1,), (1,)), ((m, 1), (1, n)), ((m, k_blocks), (k_blocks, n_blocks)),
                   ((m, k_blocks), (k_blocks, n)))
    scale_a, scale_b = (d.positive(*s) for s in scales)
    out_dtype = d.of((BF16, FP16, FP32, E4M3), (BF16,))
    return dict(a=d.normal(m, k, dtype=d.of((E4M3, E5M2), (E4M3,))), b=d.normal(n, k, dtype=E4M3).t(), scale_a=scale_a,
                scale_b=scale_b, bias=d.maybe(0.3, lambda: d.normal(n, dtype=FP32)),
                activation=d.of((None, "relu", "silu"), (None,)), out_dtype=out_dtype,
                out_scale=d.positive(1) * 3 if out_dtype == E4M3 else None, accumulate=d.one(None, None, "fp32"))


def grouped_gemm(d):
    groups, m, n, k, dtype = d.one(1, 3), d.one(8, 40), 32, 64, d.half()
    form = d.one("rows", "rows", "rows", "k", "float8")
    if form == "k":
        k = d.one(16, 40)
        return dict(a=d.normal(k, m, dtype=dtype).t(), b=d.normal(k, n, dtype=dtype), offsets=_ends(d, groups, k),
                    scale_a=None, scale_b=None, out_dtype=d.one(None, FP32))
    if form == "float8":
        return dict(a=d.normal(m, k, dtype=E4M3), b=d.normal(groups, n, k, dtype=E4M3).mT, offsets=_ends(d, groups, m),
                    scale_a=d.positive(m, 1), scale_b=d.positive(groups, 1, n), out_dtype=None)
    return dict(a=d.normal(m, k, dtype=dtype), b=d.normal(groups, k, n, dtype=dtype), offsets=_ends(d, groups, m),
                scale_a=None, scale_b=None, out_dtype=d.one(None, FP32))


def _ends(d, groups, size):
    return d.integers(0, size + 1, groups, dtype=torch.int32).sort().values


def _attention_options(d, heads, dtype):
    return dict(causal=d.chance(0.5), softmax_scale=d.one(None, 0.2),
                window_size=d.one((None, None), (None, None), (3, None), (4, 2), (-1, 0)),
                softcap=d.one(0.0, 0.0, 10.0), sinks=d.maybe(0.2, lambda: d.normal(heads, dtype=d.one(FP32, dtype))),
                deterministic=d.chance(0.2), return_lse=d.chance(0.4))


def flash_attn(d):
    queries, keys = d.of((0, 1, 7, 24), (7, 24)), d.of((0, 1, 9, 24), (9, 24))
    batch, heads_k, shared, size, dtype = d.one(1, 2), d.one(1, 2), d.one(1, 1, 3), d.of((8, 64), (64,)), d.half()
    heads = heads_k * shared
    return dict(q=d.normal(batch, queries, heads, size, dtype=dtype),
                k=d.normal(batch, keys, heads_k, size, dtype=dtype),
                v=d.normal(batch, keys, heads_k, d.of((size, size, 16), (size,)), dtype=dtype),
                **_attention_options(d, heads, dtype))


def flash_attn_varlen(d):
    heads_k, shared, dtype, count = d.one(1, 2), d.one(1, 2), d.half(), d.one(1, 3)
    lengths = [[d.one(0, 1, 5, 9) for _ in range(count)] for _ in "qk"]
    ends = [[sum(each[:i]) for i in range(count + 1)] for each in lengths]
    used = [d.maybe(0.2, lambda each=each: d.int32([min(n, d.one(0, 1, 3)) for n in each])) for each in lengths]
    total_q, total_k = ends[0][-1] + d.one(0, 2), ends[1][-1] + d.one(0, 1)
    return dict(q=d.normal(total_q, heads_k * shared, 64, dtype=dtype), k=d.normal(total_k, heads_k, 64, dtype=dtype),
                v=d.normal(total_k, heads_k, 64, dtype=dtype), cu_seqlens_q=d.int32(ends[0]),
                cu_seqlens_k=d.int32(ends[1]), max_seqlen_q=9, max_seqlen_k=9,
                **_attention_options(d, heads_k * shared, dtype), seqused_q=used[0], seqused_k=used[1])


def linear_attn(d):
    batch, tokens, heads, shared, dtype = d.one(1, 2), d.of((0, 1, 7, 24), (7, 24)), d.one(1, 2), d.one(1, 2), d.half()
    sizes, heads_v = (d.of((32, 48, 64), (64,)), d.of((32, 80), (64,))), heads * shared
    packed, count, v_first = d.chance(0.3), d.one(1, 3), d.chance(0.2)
    batch = 1 if packed else batch
    cuts = d.integers(0, tokens + 1, count + 1).sort().values.to(d.one(torch.int32, torch.int64)) if packed else None
    gates = d.one((), (heads_v,), (batch, tokens, heads_v), (batch, tokens, heads_v, sizes[0]))
    states = count if packed else batch, heads_v, *(reversed(sizes) if v_first else sizes)
    return dict(q=d.normal(batch, tokens, heads, sizes[0], dtype=dtype),
                k=d.normal(batch, tokens, heads, sizes[0], dtype=dtype),
                v=d.normal(batch, tokens, heads_v, sizes[1], dtype=dtype), g=-d.positive(*gates) if gates else None,
                scale=d.one(None, 0.5, -2, 0),
                initial_state=d.maybe(0.3, lambda: d.normal(*states, dtype=d.one(FP32, BF16))),
                output_final_state=d.chance(0.4), cu_seqlens=cuts, state_indices=None, state_v_first=v_first,
                checkpoint_every=None)


def gated_delta_rule(d):
    """Keys of length 1, or normalised by the call; at times a gate's input in the place of decays."""
    given = linear_attn(d)
    k, tokens = torch.nn.functional.normalize(given["k"].float(), dim=-1), given["v"].shape[:3]
    gate, l2norm = d.chance(0.3), d.chance(0.3)
    gates = d.one(tokens, (*tokens, k.shape[3]))
    bound = d.maybe(0.5, lambda: -5.0) if gate and gates != tokens else None
    weight = lambda *of: d.normal(*of, dtype=d.one(FP32, BF16))
    g = weight(*gates) if gate else d.maybe(0.7, lambda: -d.positive(*gates))
    return dict(given, k=given["k"] if l2norm else k.to(given["k"].dtype), g=g,
                beta=d.normal(*tokens, dtype=FP32).sigmoid().to(d.one(FP32, BF16)), use_qk_l2norm_in_kernel=l2norm,
                A_log=weight(tokens[2]) if gate else None,
                dt_bias=d.maybe(0.7, lambda: weight(*gates[2:])) if gate else None,
                use_gate_in_kernel=gate, allow_neg_eigval=d.chance(0.3), gate_lower_bound=bound)


def mamba2_ssd(d):
    batch, tokens, groups, shared, dtype = d.one(1, 2), d.of((0, 1, 7, 24), (7, 24)), d.one(1, 2), d.one(1, 2), d.half()
    (P, N), heads = (d.of((32, 80), (64,)), d.of((32, 48, 64), (64,))), groups * shared
    packed, count = d.chance(0.3), d.one(1, 3)
    batch = 1 if packed else batch
    cuts = d.integers(0, tokens + 1, count + 1).sort().values.to(d.one(torch.int32, torch.int64)) if packed else None
    states = count if packed else batch
    small = d.of((FP32, BF16, FP16), (FP32, BF16))
    return dict(x=d.normal(batch, tokens, heads, P, dtype=dtype), dt=d.positive(batch, tokens, heads).to(small),
                A=-d.positive(heads), B=d.normal(batch, tokens, groups, N, dtype=dtype, scale=N**-0.5),
                C=d.normal(batch, tokens, groups, N, dtype=dtype),
                D=d.maybe(0.6, lambda: d.normal(*(heads, P)[:d.one(1, 2)], dtype=small)),
                z=d.maybe(0.4, lambda: d.normal(batch, tokens, heads, P, dtype=dtype)),
                dt_bias=d.maybe(0.6, lambda: d.normal(heads, dtype=FP32)),
                initial_states=d.maybe(0.3, lambda: d.normal(states, heads, P, N, dtype=d.one(FP32, BF16))),
                dt_softplus=d.chance(0.7), dt_limit=d.one((0.0, float("inf")), (0.25, 2.0)),
                return_final_states=d.chance(0.4), cu_seqlens=cuts, state_indices=None, checkpoint_every=None)


def hedgehog(d):
    batch, tokens, heads, dtype, D, F = d.one(1, 2), d.of((0, 1, 70, 150), (70, 150)), d.one(1, 2), d.half(), 64, 32
    q, k, v = (d.normal(batch, tokens, heads, D, dtype=dtype) for _ in range(3))
    return dict(q=q, k=k, v=v, q_map=d.normal(heads, D, F, dtype=dtype, scale=D**-0.5),
                k_map=d.normal(heads, D, F, dtype=dtype, scale=D**-0.5), linear_factor=d.positive(heads),
                window_factor=d.positive(heads), window_size=64)


def based(d):
    batch, tokens, heads, shared, dtype = d.one(1, 2), d.of((0, 1, 7, 24), (7, 24)), d.one(1, 2), d.one(1, 2), d.half()
    q, k = (d.normal(batch, tokens, heads, 16, dtype=dtype) for _ in range(2))
    return dict(q=q, k=k, v=d.normal(batch, tokens, heads * shared, d.of((32, 80), (64,)), dtype=dtype),
                scale=d.one(None, 0.5, -2, 0), use_norm=d.chance(0.7))


def causal_conv1d(d):
    batch, tokens, C, W = d.one(1, 2), d.of((0, 1, 2, 24), (2, 24)), d.of((1, 7, 64), (64,)), d.of((2, 4, 8), (4,))
    normed, numbers = d.chance(0.2), d.chance(0.2)
    C = 132 if normed else C
    dtype, packed, count = d.real(), d.chance(0.3), d.one(1, 3)
    batch = 1 if packed else batch
    cuts = d.integers(0, tokens + 1, count + 1).sort().values.to(d.one(torch.int32, torch.int64)) if packed else None
    small = d.of((FP32, dtype), (dtype,))
    x = d.normal(batch, C, tokens, dtype=dtype).mT if d.chance(0.3) else d.normal(batch, tokens, C, dtype=dtype)
    numbers = numbers and not packed
    state = d.maybe(0.4, lambda: d.normal(count if packed else batch, C, W - 1, dtype=dtype))
    return dict(x=x, weight=d.normal(C, W, dtype=small), bias=d.maybe(0.5, lambda: d.normal(C, dtype=small)),
                activation=d.one(None, "silu"), output_final_state=d.chance(0.4) and not numbers, cu_seqlens=cuts,
                initial_state=None if numbers else state, norm_heads=d.one(1, 2) if normed else 0, head_dim=64,
                seq_idx=d.integers(0, 3, batch, tokens).int() if numbers else None)


def scan(d):
    batch, tokens, C, dtype = d.one(1, 2), d.of((0, 1, 33, 100), (33, 100)), d.of((1, 7, 64), (64,)), d.real()
    time = d.chance(0.4)
    lying = lambda: d.normal(batch, C, tokens, dtype=dtype).mT if time else d.normal(batch, tokens, C, dtype=dtype)
    return dict(a=lying().tanh(), b=lying(), reverse=d.chance(0.4), output_final_state=d.chance(0.4),
                initial_state=d.maybe(0.5, lambda: d.normal(batch, C, dtype=d.of((FP32, dtype), (FP32,)))))


def fft_conv(d):
    batch, H, L, taps = d.one(1, 2, 3), d.one(1, 2), d.of((0, 1, 5, 24), (5, 24)), d.of((1, 3, 40), (3, 40))
    dtype = d.half()
    gate, skip = lambda: d.normal(batch, H, L, dtype=dtype), lambda: d.normal(H, dtype=d.one(FP32, dtype))
    return dict(u=gate(), k=d.normal(H, taps, dtype=FP32), d=d.maybe(0.5, skip),
                causal=d.chance(0.7), pre_gate=d.maybe(0.3, gate), post_gate=d.maybe(0.3, gate),
                precision=d.one("half", "split"))


def causal_conv1d_step(d):
    count, C, W, dtype = d.one(1, 3), d.of((1, 7, 64), (64,)), d.of((2, 4, 8), (4,)), d.real()
    rows, indices, _ = _rows_of_a_pool(d, count, 0)
    return dict(x=d.normal(*d.one((count, C), (count, d.one(0, 1, 3), C)), dtype=dtype),
                conv_states=d.normal(rows, C, W - 1 + d.one(0, 1), dtype=dtype), weight=d.normal(C, W, dtype=dtype),
                bias=d.maybe(0.5, lambda: d.normal(C, dtype=dtype)), activation=d.one(None, "silu"),
                cache_indices=indices, out=None)


def _rows_of_a_pool(d, count, tokens):
    """(rows of the pool, one for each sequence or None, numbers of accepted tokens or None)."""
    if tokens and d.chance(0.2):
        rows = torch.arange(count * tokens).view(count, tokens).flip(0)
        return count * tokens + 1, d.int32(rows.tolist()), d.int32([d.one(1, tokens) for _ in range(count)])
    return count + 1, d.maybe(0.7, lambda: d.int32([*range(1, count), -1][:count])), None


def linear_attn_step(d):
    count, tokens, heads, shared, dtype = d.one(1, 3), d.one(1, 1, 1, 2, 4), d.one(1, 2), d.one(1, 2), d.half()
    K, V, heads_v = d.of((32, 48, 144), (64,)), d.of((32, 80), (64,)), heads * shared
    gates = d.one((), (heads_v,), (count, tokens, heads_v), (count, tokens, heads_v, K))
    rows, indices, accepted = _rows_of_a_pool(d, count, tokens)
    v_first = d.chance(0.5)
    return dict(q=d.normal(count, tokens, heads, K, dtype=dtype), k=d.normal(count, tokens, heads, K, dtype=dtype),
                v=d.normal(count, tokens, heads_v, V, dtype=dtype), g=-d.positive(*gates) if gates else None,
                state=d.normal(rows, heads_v, *((V, K) if v_first else (K, V)), dtype=d.one(FP32, BF16)),
                scale=d.one(None, 0.5, -2, 0), state_indices=indices, num_accepted_tokens=accepted,
                state_v_first=v_first, out=None)


def gated_delta_rule_step(d):
    """Keys of length 1."""
    given = linear_attn_step(d)
    k, tokens = torch.nn.functional.normalize(given["k"].float(), dim=-1), given["v"].shape[:3]
    gates = d.one(tokens, (*tokens, k.shape[-1]))
    return dict(given, k=k.to(given["k"].dtype), g=d.maybe(0.7, lambda: -d.positive(*gates)),
                beta=d.normal(*tokens, dtype=FP32).sigmoid().to(d.one(FP32, BF16)),
                use_qk_l2norm_in_kernel=d.chance(0.5))


def ssd_step(d):
    count, tokens, heads, shared, dtype = d.one(1, 3), d.one(0, 0, 2), d.one(1, 2), d.one(1, 2), d.half()
    K, P, all_heads, lead = d.of((32, 48), (64,)), d.of((32, 80), (64,)), heads * shared, (tokens,) if tokens else ()
    rows, indices, accepted = _rows_of_a_pool(d, count, tokens)
    return dict(state=d.normal(rows, all_heads, P, K, dtype=d.one(FP32, BF16)),
                x=d.normal(count, *lead, all_heads, P, dtype=dtype),
                dt=d.positive(count, *lead, all_heads).to(d.one(FP32, dtype)), A=-d.positive(all_heads),
                B=d.normal(count, *lead, heads, K, dtype=dtype), C=d.normal(count, *lead, heads, K, dtype=dtype),
                D=d.maybe(0.5, lambda: d.normal(*d.one((all_heads,), (all_heads, P)), dtype=FP32)),
                z=d.maybe(0.5, lambda: d.normal(count, *lead, all_heads, P, dtype=dtype)),
                dt_bias=d.maybe(0.5, lambda: d.normal(all_heads, dtype=FP32)), dt_softplus=d.chance(0.5),
                state_batch_indices=indices, num_accepted_tokens=accepted, out=None)


def _rope(d, names):
    batch, length, heads, dtype, table = d.one(1, 2), d.one(1, 6), d.one(1, 3), d.real(), 16
    size = d.of((8, 64), (64,))
    half, table_dtype, packed = d.one(size // 2, size // 4), d.one(FP32, dtype), length > 1 and d.chance(0.2)
    shape = (length, heads) if packed else (batch, length, heads)
    options = dict(seqlen_offsets=0, position_ids=None, cu_seqlens=None)
    tables = (table, half)
    if packed:
        options["cu_seqlens"] = d.int32([0, length // 2, length - 1])
    elif d.chance(0.2):
        tables = (d.one(1, batch), length, half)
    else:
        how = d.one("plain", "offset", "offsets", "ids")
        if how == "offset":
            options["seqlen_offsets"] = 3
        elif how == "offsets":
            options["seqlen_offsets"] = d.integers(0, 4, batch, dtype=torch.int32)
        elif how == "ids":
            options["position_ids"] = d.integers(0, table, *d.one((batch, length), (length,), (1, length)))
    tensors = {n: d.normal(*shape[:-1], shape[-1] + i, size, dtype=dtype) for i, n in enumerate(names)}
    return dict(tensors, cos=d.normal(*tables, dtype=table_dtype), sin=d.normal(*tables, dtype=table_dtype),
                interleaved=d.chance(0.4), **options, max_seqlen=None)


def rope(d):
    return dict(_rope(d, ("x",)), inplace=d.chance(0.2))


def rope_qk(d):
    return _rope(d, ("q", "k"))


def rope_cos_sin(d):
    return dict(seqlen=d.one(0, 1, 9, 33), dim=d.one(2, 8, 64), base=d.one(10000.0, 500), dtype=d.one(FP32, BF16, FP16),
                device=d.device, inv_freq=None)


def swiglu(d):
    rows, n, dtype = d.rows(), d.of((2, 14, 64), (64,)), d.real()
    up = d.maybe(0.6, lambda: d.normal(*rows, n, dtype=dtype))
    return dict(gate=d.normal(*rows, n, dtype=dtype), up=up,
                layout="split" if up is not None else d.one("split", "interleaved"))


def geglu(d):
    return dict(swiglu(d), approximate=d.one("none", "tanh"))
