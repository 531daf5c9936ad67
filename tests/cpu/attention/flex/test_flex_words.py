"""A mask's bits for a tile, as a kernel's warp makes them, against the mask element by element."""
import numpy
import pytest
import torch

from tests.helpers.attention import flex_gallery as gallery
from tests.helpers.emulation import flex_words
from tkq.attention.flex.functions.trace import trace
from tkq.attention.flex.words import COLUMNS, ELEMENTS, EQUAL, LIMITS, LOGIC, ROWS, words
from tkq.reference.flex import places
from tkq.reference.graphs import evaluate

B, H, S = 2, 3, 300
G = torch.Generator().manual_seed(0)
STARTS, FLAGS = torch.randint(-40, S + 90, (S,), generator=G), torch.rand(S, generator=G) < 0.4
LATE = STARTS.to(torch.int32)
ENDS = torch.tensor([-(1 << 63), (1 << 63) - 1, 1 - (1 << 63), 150] * (S // 4))  # no key or query is beyond most
LEAST = torch.full((S,), -(1 << 31), dtype=torch.int32)
MULTIPLES = (torch.arange(S, dtype=torch.int32) * 1001001).float()
MASKS = {
    **{name: mask for name, (_, mask) in gallery.gallery(B, H, S, "cpu").items() if mask is not None},
    "equal": lambda b, h, q, kv: (kv == q - 3) | (q + 5 == kv) | (kv == 17),
    "unequal": lambda b, h, q, kv: (kv != q - 3) & (kv != 17) & (q != 5),
    "strict": lambda b, h, q, kv: (kv < q) & (kv > q - 50) | (2 * kv - kv <= h * 60) & ~(kv <= 30),
    "backwards": lambda b, h, q, kv: (-kv <= q - 200) ^ (100 - kv > b * 60) | (q - kv > 2**31 - 400),
    "far": lambda b, h, q, kv: (kv < 2**31 - 1) & (kv - q > -(2**31 - 1)) & (kv >= q - 90),
    "tables of rows": lambda b, h, q, kv: (kv >= STARTS[q]) | (kv < LATE[q] - 60),
    "tables of columns": lambda b, h, q, kv: (q >= STARTS[kv]) & FLAGS[kv],
    "flags": lambda b, h, q, kv: torch.where(FLAGS[kv], FLAGS[q], q >= kv) == (b == 0),
    "twice": lambda b, h, q, kv: (STARTS[q] // 20 == STARTS[kv] // 20) | ((q * kv) % 3 == h),
    "ends of int64": lambda b, h, q, kv: torch.where(h == 1, (kv <= ENDS[q]) ^ (-kv < ENDS[q]), torch.where(
        h == 2, (kv > ENDS[q]) ^ (q == ENDS[kv]), (ENDS[kv] >= q) ^ (q - kv < ENDS[q]))),
    "least quotient": lambda b, h, q, kv: (LEAST[q] // 3 < -kv) & (LEAST[kv] // -7 > q),
    "rounded multiples": lambda b, h, q, kv: (kv * 1001001).float() == MULTIPLES[kv],
    "shifts by all bits": lambda b, h, q, kv: (
        ((kv - q) >> 35 == (q << 32) - 1) ^ (kv.long() << -1 == q) ^ (kv >> -3 < h)),
    "one": lambda b, h, q, kv: h == 1,
}
PLACES = [(0, 0), (128, 128), (144, 128), (80, 192), (256, 256), (288, 0), (0, 256)]


@pytest.mark.parametrize("name", MASKS)
def test_words(monkeypatch, name):
    """Tiles on the diagonal, far from it, at the end; transposed ones, whose columns are queries."""
    mask = trace("mask_mod", MASKS[name])
    at = {key: x.long() if key in "bh" else x for key, x in places(B, H, S + 100, S + 100, "cpu").items()}
    wanted = evaluate(*mask, at).broadcast_to(B, H, S + 100, S + 100)
    for i, (row, col) in enumerate(PLACES):
        b, h, width = i % B, i % H, 64 if i % 2 else 128
        for along in ("kv", "q"):
            found = flex_words.seen(monkeypatch, mask, along, (b, h), (row, col), width)
            tile = (wanted if along == "kv" else wanted.mT)[b, h, row:row + 16, col:col + width].numpy()
            assert numpy.array_equal(found[:tile.shape[0], :tile.shape[1]], tile), (row, col, along)


def how(mask, along="kv"):
    of = words(trace("mask_mod", mask).graph, along)
    return [of.of[i] for i in sorted(of.of)], len(of.shared)


def test_how_bools_are_made():
    assert how(gallery.causal) == ([LIMITS], 0)
    assert how(MASKS["document"])[1] == 0 and sorted(how(MASKS["document"])[0]) == [EQUAL, LIMITS, LOGIC]
    assert how(lambda b, h, q, kv: FLAGS[kv] | FLAGS[q]) == ([COLUMNS, ROWS, LOGIC], 0)
    assert how(lambda b, h, q, kv: 2 * kv <= q) == ([ELEMENTS], 0)
    assert how(gallery.causal, "q") == ([LIMITS], 0)
