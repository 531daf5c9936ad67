"""Usual arguments of attention in float8."""
from .usual import E4M3, FP32


def flash_attn_fp8(d):
    batch, queries, keys = d.one(1, 2), d.of((0, 1, 7, 24), (7, 24)), d.of((0, 1, 9, 24), (9, 24))
    heads_k, shared, size = d.one(1, 2), d.one(1, 1, 3), d.of((32, 64, 96), (64,))
    q, k, v = (d.normal(batch, rows, heads, size, dtype=E4M3)
               for rows, heads in ((queries, heads_k * shared), (keys, heads_k), (keys, heads_k)))
    scales = [d.maybe(0.5, lambda: d.positive(batch, heads_k)) for _ in range(3)]
    return dict(q=q, k=k, v=v, q_descale=scales[0], k_descale=scales[1], v_descale=scales[2], causal=d.chance(0.5),
                softmax_scale=d.one(None, 0.2), window_size=d.one((None, None), (3, None), (4, 2), (-1, 0)),
                accumulate=d.one("two_level", "fast"), out_dtype=d.half(), return_lse=d.chance(0.4))


def flash_attn_fp8_varlen(d):
    heads_k, shared, count, size = d.one(1, 2), d.one(1, 1, 3), d.one(1, 3), d.of((32, 64, 96), (64,))
    lengths = [[d.one(0, 1, 5, 9) for _ in range(count)] for _ in "qk"]
    ends = [[sum(each[:i]) for i in range(count + 1)] for each in lengths]
    used = [d.maybe(0.2, lambda each=each: d.int32([min(n, d.one(0, 1, 3)) for n in each])) for each in lengths]
    totals = ends[0][-1] + d.one(0, 2), ends[1][-1] + d.one(0, 1)
    q, k, v = (d.normal(total, heads, size, dtype=E4M3)
               for total, heads in ((totals[0], heads_k * shared), (totals[1], heads_k), (totals[1], heads_k)))
    scales = [d.maybe(0.5, lambda: d.positive(count, heads_k)) for _ in range(3)]
    starts, table = d.int32(ends[1]), None
    if d.chance(0.3):
        pages, page, most = d.one(3, 5), d.one(1, 4, 7), d.one(1, 2)
        k, v = (d.normal(pages, page, heads_k, size, dtype=E4M3) for _ in range(2))
        starts, table = None, d.int32([[d.one(0, 1, 2) for _ in range(most)] for _ in range(count)])
        used[1] = d.int32([d.one(0, 1, page, most * page) for _ in range(count)])
    return dict(q=q, k=k, v=v, cu_seqlens_q=d.int32(ends[0]), cu_seqlens_k=starts, block_table=table, max_seqlen_q=9,
                max_seqlen_k=9, q_descale=scales[0], k_descale=scales[1], v_descale=scales[2], causal=d.chance(0.5),
                softmax_scale=d.one(None, 0.2), window_size=d.one((None, None), (3, None), (4, 2), (-1, 0)),
                accumulate=d.one("two_level", "fast"), out_dtype=d.half(), seqused_q=used[0], seqused_k=used[1],
                return_lse=d.chance(0.4))


def quantize_qkv(d):
    batch, queries, keys, dtype = d.one(0, 1, 2), d.of((0, 1, 7, 24), (7, 24)), d.of((0, 1, 9, 24), (9, 24)), d.real()
    heads_k, shared, size = d.one(1, 2), d.one(1, 1, 3), d.of((8, 40, 64), (64,))
    tables = size % 16 == 0 and d.chance(0.3)
    queries = keys if tables else queries
    given = dict(zip("qkv", (d.normal(batch, rows, heads, size, dtype=dtype) for rows, heads in (
        (queries, heads_k * shared), (keys, heads_k), (keys, heads_k))), strict=True))
    cos, sin = (d.normal(keys + 2, size // 2, dtype=FP32) if tables else None for _ in range(2))
    return dict(given, rotate=size == 64 and d.chance(0.3), smooth_k=keys != 1 and d.chance(0.3), cos=cos, sin=sin)
