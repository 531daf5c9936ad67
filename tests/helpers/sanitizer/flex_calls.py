"""Attention with functions of the user's, for the sanitizer."""
import torch

from tests.helpers.sanitizer.calls import grad, on, randn


def own_functions(device):
    """Odd lengths, blocks of 64 and of 128, indices and lists that lie, captured gradients, wide heads; both
    directions."""
    import tkq

    ids, slopes = on(device, torch.tensor([0, 1 << 40, -(1 << 40), 3] * 50),
                     randn(5, 4, dtype=torch.float32, grad=True))

    def document(b, h, q_idx, kv_idx):
        return (ids[q_idx] == ids[kv_idx]) | (q_idx >= kv_idx)

    def causal(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

    def lying(score, b, h, q_idx, kv_idx):
        return score + slopes[ids[kv_idx]] * (kv_idx - q_idx)

    def capped(score, b, h, q_idx, kv_idx):
        return 20 * torch.tanh(score / 20)

    for name, D, size, score_mod, mask_mod in (("causal", 128, 128, None, causal), ("indices", 64, 64, lying, document),
                                               ("softcap", 128, 128, capped, None),
                                               ("wide", 256, 128, None, causal),
                                               ("wide softcap", 256, 64, capped, causal)):
        q, k, v, do = on(device, randn(0, 1, 4, 150, D, grad=True), randn(1, 1, 2, 200, D, grad=True),
                         randn(2, 1, 2, 200, D, grad=True), randn(3, 1, 4, 150, D))
        mask = mask_mod and tkq.create_block_mask(mask_mod, None, None, 150, 200, device=device, BLOCK_SIZE=size)
        o, lse = tkq.flex_attention(q, k, v, score_mod, mask, enable_gqa=True, return_lse=True)
        leaves = (q, k, v, slopes) if score_mod is lying else (q, k, v)
        yield name, (o, lse, *grad((o,), leaves, (do,)))
    with torch.no_grad():
        mask = tkq.create_block_mask(causal, None, None, 150, 200, device=device)
        mask.kv_num_blocks.fill_(1 << 30)
        mask.full_kv_indices.fill_(-(1 << 30))
        yield "lists that lie", (tkq.flex_attention(q, k, v, None, mask, enable_gqa=True).isnan().any(),)
