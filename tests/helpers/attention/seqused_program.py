"""The backward of a sequence of which few queries are in use, by three blocks: a program of its own, as it may hang.

    python -m tests.helpers.attention.seqused_program FORM...    # of `FORMS`

dQ's accumulator has room for all of a head's 2000 rows, 32 tiles, of which one is used. The 12 heads are worked on
together, as 64 rows of each fit in L2: the three blocks' first tasks are heads 0, 1 and 2, and then 3, 4 and 5. No tile
of head 0 is done with before its 16 blocks of keys are, and those come after the first ones of all heads. So warps that
make zeroes must get 12 heads ahead of it, 384 tiles; counted by the rows in use it would be 24 heads of 2 tiles, which
leaves head 2 without its zeroes for ever.
"""
import dataclasses
import sys

import torch

from tests.helpers.attention.varlen_gradients import BF16, cumulated, one_sequence
from tkq.attention.arguments import Lengths, Options
from tkq.attention.backward import varlen_ops
from tkq.attention.backward.plan import SINGLE
from tkq.runtime.device import arch
from tkq.testing import assert_2x

ROWS, USED, HEADS, DIM = 2000, 64, 12, 128
HELPER_WARPS = dataclasses.replace(SINGLE[DIM], store_from_registers=True, persistent=True, ping_pong=True,
                                   helper_warps=True, l2_section_mb=8, registers=(32, 64, 208))
FORMS = {"": HELPER_WARPS, "fuse_preprocess": dataclasses.replace(HELPER_WARPS, fuse_preprocess=True)}


def check(form):
    arch.num_sms = lambda device: 3
    options, cu = Options(True), cumulated([ROWS])
    q, k, v, do = (torch.randn(ROWS, HEADS, DIM, device="cuda", dtype=BF16) for _ in range(4))
    given = q[:USED], k, v, do[:USED], None, None, options
    one_o, one_lse, true = one_sequence(*given, torch.float64)
    low = one_sequence(*given, BF16)[2]
    o, lse = torch.zeros_like(q), torch.full((HEADS, ROWS), -torch.inf, device="cuda")
    o[:USED], lse[:, :USED] = one_o.to(BF16), one_lse.float()
    lengths = Lengths(cu, cu, torch.tensor([USED], device="cuda", dtype=torch.int32), None, ROWS, ROWS)
    found = [torch.zeros_like(x) for x in (q, k, v)]
    varlen_ops.run((do, q, k, v, o, lse, None), found, lengths, options, config=FORMS[form])
    torch.cuda.synchronize()
    for name, a, b, c in zip(("dq", "dk", "dv"), (found[0][:USED], *found[1:]), true, low):
        assert_2x(torch.where((a.double() - b).abs() <= 1e-5, b.to(BF16), a), b, c, 1, name)


if __name__ == "__main__":
    for each in sys.argv[1:]:
        check(each)
