"""What the tests of attention over packed sequences on a GPU share: inputs, the launch, and the judgement of each
sequence by itself."""
import math

import torch

from tests.helpers.attention.inputs import judge
from tkq.attention import varlen_ops
from tkq.attention.arguments import Lengths, Options
from tkq.attention.common.operands import Operands

BF16 = torch.bfloat16
MIXED = [(1, 1), (0, 0), (513, 513), (64, 64), (1, 900), (0, 70), (65, 0), (113, 203), (300, 100), (129, 127), (2, 63)]
LONGER = [(4097, 4097), (63, 63), (65, 65), (799, 3), (1023, 1023), (1024, 1023), (63, 65)]


def cumulated(lengths):
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).int()


def make(lengths, heads, kv_heads, dim, dtype=BF16, spare=0, seed=0, dim_v=None):
    """(q, k, v, cu_q, cu_k): rows between and behind sequences do not exist, but for ``spare`` ones behind: NaN."""
    g = torch.Generator("cuda").manual_seed(seed + len(lengths))
    cu_q, cu_k = (cumulated(n) for n in zip(*lengths))

    def new(cu, h, d):
        x = torch.full((int(cu[-1]) + spare, h, d), math.nan, device="cuda", dtype=dtype)
        x[:int(cu[-1])] = torch.randn(int(cu[-1]), h, d, device="cuda", generator=g).to(dtype)
        return x

    return new(cu_q, heads, dim), new(cu_k, kv_heads, dim), new(cu_k, kv_heads, dim_v or dim), cu_q, cu_k


def run(tensors, lengths, sinks=None, **options):
    """Launch the kernel into the last two of tensors, o and lse."""
    varlen_ops.run(Operands(*tensors, sinks), lengths, Options(**options))


def compare(q, k, v, cu_q, cu_k, what="", seqused_q=None, seqused_k=None, max_q=4096, max_k=4096, **options):
    """Run on poisoned outputs; judge each sequence's o and lse, and that all other rows saw nothing."""
    shape = (*q.shape[:2], v.shape[2])
    o = torch.full(shape, math.nan, dtype=q.dtype, device="cuda")
    lse = torch.full((q.shape[1], q.shape[0]), math.nan, device="cuda")
    if seqused_q is not None:  # as the public function prepares them
        o.zero_()
        lse = varlen_ops.nothing_seen(tuple(lse.shape), options.get("sinks"), "cuda")
    run((q, k, v, o, lse), Lengths(cu_q, cu_k, seqused_q, seqused_k, max_q, max_k), **options)
    starts_q, starts_k = cu_q.tolist(), cu_k.tolist()
    outside = torch.ones(q.shape[0], dtype=torch.bool, device="cuda")
    for s in range(len(starts_q) - 1):
        a, c = starts_q[s], starts_k[s]
        rows = starts_q[s + 1] - a if seqused_q is None else int(seqused_q[s])
        keys = starts_k[s + 1] - c if seqused_k is None else int(seqused_k[s])
        if rows:
            outside[a:a + rows] = False
            judge(o[None, a:a + rows], lse[None, :, a:a + rows], q[None, a:a + rows], k[None, c:c + keys],
                  v[None, c:c + keys], f"{what} sequence {s}, {rows} x {keys}, {options}", **options)
    assert not outside.any() or o[outside].abs().max() == 0, f"{what}: rows of no sequence"
    sinks = options.get("sinks")
    nothing = torch.full((q.shape[1],), -math.inf, device="cuda") if sinks is None else sinks.float()
    assert torch.allclose(lse[:, outside], nothing[:, None].expand(-1, int(outside.sum())), rtol=1e-6, atol=1e-6)
    return o, lse
