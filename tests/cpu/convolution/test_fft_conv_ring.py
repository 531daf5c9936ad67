"""Filters' spectra in a ring, of heads that a block's tiles belong to: each tile is multiplied by its own head's."""
import random
from types import SimpleNamespace

import pytest

from tests.helpers.emulation.fft_ring import Block
from tkq.convolution.fft.plan import SMS, plan, tiles_of
from tkq.convolution.fft.spec import FftSpec


@pytest.mark.parametrize("spec", [FftSpec("bf16", 64), FftSpec("bf16", 64, blocks=2), FftSpec("bf16", 64, False),
                                  FftSpec("bf16", 16)], ids=["one-block", "two-blocks", "circular", "of-warps"])
def test_tiles_and_their_heads(spec, monkeypatch):
    """Blocks that begin with a head's last tile: other warpgroups go on to the next head at once."""
    chance = random.Random(0)
    sizes = [(140, 7), (1, 7), (133, 1), (300, 9), (chance.randrange(1, 300), chance.randrange(1, 20))]
    for i, (H, B) in enumerate(sizes):
        config, tiles = plan(spec, B), H * tiles_of(spec, B)
        blocks = min(SMS, tiles)
        for at in {0, blocks - 1, *chance.sample(range(blocks), min(blocks, 3))}:
            with monkeypatch.context() as patched:
                block = Block(spec, config, SimpleNamespace(u=SimpleNamespace(shape=(B, H, 64))), 1000 * i + at)
                block.instead_of_the_dsl(patched)
                found = block.run(at, blocks)
            per_head = tiles_of(spec, B)
            mine = [divmod(t, per_head) for t in range(at * tiles // blocks, (at + 1) * tiles // blocks)]
            assert sorted(found) == [(warp, *of) for warp in range(4) for of in mine], (H, B, at)
