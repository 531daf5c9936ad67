"""What the kernels under pressure (`tests.helpers.sanitizer.pressed`) share: a result again and again, a device of few
processors."""
import torch

from tkq.runtime.device import arch

BF16 = torch.bfloat16
REPEATS = 6


def same_bits(judged, run=None, repeats=REPEATS):
    """judged() gives tensors, and judges them; run(), which only gives them, or judged again, the same bits each time.
    """
    first = [x.clone() for x in judged()]
    for _ in range(repeats):
        for i, (a, b) in enumerate(zip((run or judged)(), first, strict=True)):
            bits = [x.contiguous().view(torch.uint8) for x in (a, b)]
            assert torch.equal(*bits), f"result {i}: other bits in another run"


def num_sms(n):
    arch.num_sms = lambda device: n
