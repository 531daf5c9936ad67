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
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), f"result {i}: other bits in another run"


def num_sms(n):
    arch.num_sms = lambda device: n
