"""Attention over caches, for the sanitizer."""
import torch

from tests.helpers.sanitizer.calls import on, randn


def attended(device):
    """Attention over pages of any size, over rows and over latent pages, planned in the call; new keys, rotated; two
    states merged."""
    import tkq
    from tkq.reference.mla import packed

    with torch.no_grad():
        for page, heads, dim in ((5, 6, 64), (16, 8, 128)):
            q, k, v, lengths, table = on(
                device, randn(0, 3, 2, heads, dim), randn(1, 60, page, 2, dim), randn(2, 60, page, 2, dim),
                torch.tensor([0, 1, 19 * page - 1], dtype=torch.int32), torch.randperm(60).view(3, 20).int())
            yield f"flash_attn_with_kvcache {page}", tkq.flash_attn_with_kvcache(
                q, k, v, cache_seqlens=lengths, block_table=table, return_lse=True, batch_invariant=page == 5)
        q, rows, lengths, table = on(device, randn(0, 3, 2, 40, 576), randn(1, 60, 5, 576),
                                     torch.tensor([0, 1, 94], dtype=torch.int32), torch.randperm(60).view(3, 20).int())
        yield "mla_decode", tkq.mla_decode(q, rows, table, lengths, softmax_scale=0.1, return_lse=True)
        lists = on(device, torch.randint(-1, 300, (3, 2, 90), dtype=torch.int32))[0]
        yield "mla_decode sparse", tkq.mla_decode(q, rows, softmax_scale=0.1, indices=lists, return_lse=True)
        small = packed(rows)
        yield "mla_decode float8", tkq.mla_decode(q, small, table, lengths, softmax_scale=0.1)
        yield "mla_decode float8 sparse", tkq.mla_decode(q, small, softmax_scale=0.1, indices=lists)
        caches = on(device, randn(3, 7, 3, 2, 64), randn(4, 7, 3, 2, 40))
        new = on(device, randn(5, 4, 2, 64), randn(6, 4, 2, 40), torch.tensor([20, 0, -1, 7]), randn(7, 4, 5, 64))
        cos, sin, positions = on(device, randn(8, 9, 16), randn(9, 9, 16), torch.tensor([8, 0, 3, 1]))
        turned = tkq.kv_append(*new[:2], *caches, new[2], cos=cos, sin=sin, positions=positions, q=new[3])
        yield "kv_append", (turned, *caches)
        low = [x.to(torch.float8_e4m3fn) for x in on(device, randn(1, 60, 16, 2, 128), randn(2, 60, 16, 2, 128))]
        scales = on(device, torch.rand(2, 60, 16, 2))[0]
        tkq.kv_append(*on(device, randn(5, 4, 2, 128), randn(6, 4, 2, 128)), *low,
                      *on(device, torch.tensor([20, 0, -1, 7])), k_scale=scales[0], v_scale=scales[1])
        yield "kv_append float8", (*[x.float() for x in low], scales)
        q, lengths, table = on(device, randn(0, 3, 2, 8, 128), torch.tensor([0, 1, 300], dtype=torch.int32),
                               torch.randperm(60).view(3, 20).int())
        yield "flash_attn_with_kvcache float8", tkq.flash_attn_with_kvcache(
            q, *low, cache_seqlens=lengths, block_table=table, k_descale=scales[0], v_descale=scales[1])
        yield "flash_attn_with_kvcache with a tree mask", tkq.flash_attn_with_kvcache(
            q, *[x.bfloat16() for x in low], cache_seqlens=lengths, block_table=table,
            tree_mask=on(device, torch.tensor([[1, 3], [1, 2], [1, 3]]))[0])
        starts = on(device, torch.tensor([0, 0, 1, 6], dtype=torch.int32))[0]
        yield "flash_attn_with_kvcache ragged", tkq.flash_attn_with_kvcache(
            q.flatten(0, 1), *on(device, randn(1, 60, 16, 2, 128), randn(2, 60, 16, 2, 128)), cache_seqlens=lengths,
            block_table=table, cu_seqlens_q=starts)
        *keys, shared = on(device, randn(1, 60, 16, 2, 128), randn(2, 60, 16, 2, 128),
                           torch.tensor([130, 150, 320], dtype=torch.int32))
        yield "cascade_attention", tkq.cascade_attention(
            q, *keys, block_table=table[:1].expand(3, -1), cache_seqlens=shared, prefix_len=129, cascade=True,
            return_lse=True)
        q, k, v, lengths, table = on(
            device, randn(0, 2, 800, 8, 64), randn(1, 120, 16, 2, 64), randn(2, 120, 16, 2, 64),
            torch.tensor([900, 801], dtype=torch.int32), torch.randperm(120).view(2, 60).int())
        yield "flash_attn_with_kvcache chunked", tkq.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=lengths, block_table=table, return_lse=True)
        starts = on(device, torch.tensor([0, 750, 1600], dtype=torch.int32))[0]
        yield "flash_attn_with_kvcache chunked ragged", tkq.flash_attn_with_kvcache(
            q.flatten(0, 1), k, v, cache_seqlens=lengths, block_table=table, cu_seqlens_q=starts, return_lse=True)
        states = on(device, randn(0, 2, 5, 3, 40), randn(1, 2, 3, 5, dtype=torch.float32), randn(2, 2, 5, 3, 40),
                    randn(3, 2, 3, 5, dtype=torch.float32))
        yield "merge_state", tkq.merge_state(*states)
