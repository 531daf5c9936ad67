"""flash-attention's function over caches on a GPU: new keys are rotated, written to their pages and seen."""
import torch

from tests.helpers.attention.interface import step
from tests.helpers.sanitizer.nan_fill import poisoned
from tkq.flash_attn_interface import flash_attn_with_kvcache
from tkq.testing import assert_2x


def test_new_keys():
    torch.manual_seed(0)
    table, lengths = torch.tensor([[5, 0, 3], [1, 4, -1]], dtype=torch.int32), [37, 20]
    caches = [torch.randn(6, 16, 2, 64, dtype=torch.bfloat16) for _ in range(2)]
    q, k, v = (torch.randn(2, 3, heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2))
    angles = torch.randn(64, 16)
    rotary = angles.cos(), angles.sin(), True
    where = lambda s, i: (int(table[s, i // 16]), i % 16)
    want, keys, values = step(q, caches, (k, v), lengths, where, rotary)
    found = [x.cuda() for x in caches]
    with poisoned():
        o = flash_attn_with_kvcache(
            q.cuda(), *found, k.cuda(), v.cuda(), rotary[0].cuda(), rotary[1].cuda(), block_table=table.cuda(),
            cache_seqlens=torch.tensor(lengths, dtype=torch.int32, device="cuda"), causal=True)
    cpu = flash_attn_with_kvcache(q, *(x.clone() for x in caches), k, v, *rotary[:2], block_table=table, causal=True,
                                  cache_seqlens=torch.tensor(lengths, dtype=torch.int32))
    assert_2x(o.cpu(), want, cpu)
    torch.testing.assert_close(found[0].cpu(), keys, atol=0.02, rtol=0.01)
    assert torch.equal(found[1].cpu(), values)
