"""How plans of latent attention divide the work: the kernel's own code against plain Python, and what is chosen."""
import random

import pytest
import torch

from tests.helpers.emulation import finish
from tests.helpers.emulation.decode import BalancerOnCpu
from tests.helpers.shipped import of_name
from tkq.attention.decode import words
from tkq.attention.decode.balance import MERGE, balanced, partial_cost
from tkq.attention.decode.catalog import shipped
from tkq.attention.decode.planned import Planned
from tkq.reference import decode as reference
from tkq.testing import sass

BEGIN = 4


def _pieces(blocks, parts, rows=64):
    """(blocks of a part, of each sequence what each part has); begins are in order, with gaps inside of parts."""
    starts, size, total = balanced(blocks, parts, BEGIN, rows)
    assert starts[0] == 0 and total <= size * parts and total == starts[-1] + blocks[-1]
    for a, n, b in zip(starts, blocks, starts[1:]):
        assert b >= a + n + BEGIN or (b % size == 0 and b >= a + n)
    cut = [[min(a + n, (p + 1) * size) - max(a, p * size) for p in range(a // size, (a + n - 1) // size + 1)]
           for a, n in zip(starts, blocks)]
    return size, cut


def test_all_blocks_have_a_part():
    generator = random.Random(0)
    for _ in range(60):
        parts, most = generator.choice((1, 2, 8, 33, 66, 132)), generator.choice((1, 20, 300, 5000))
        blocks = [generator.randrange(1, most + 1) for _ in range(generator.randrange(1, min(8 * parts, 90) + 1))]
        size, cut = _pieces(blocks, parts)
        assert [sum(pieces) for pieces in cut] == blocks and max(map(max, cut)) <= size


@pytest.mark.parametrize("sequences, parts, rows, pieces", [
    (64, 66, 64, 1), (128, 66, 64, 1), (256, 66, 64, 1), (16, 66, 64, 4), (32, 66, 64, 2), (16, 132, 16, 8),
    (64, 132, 16, 2), (128, 132, 16, 1), (8, 66, 64, 8), (1, 66, 64, 32)])
def test_like_sequences_have_like_pieces(sequences, parts, rows, pieces):
    """Of 64 blocks each. Equal shares of all work would cut each of 64 sequences."""
    _, cut = _pieces([64] * sequences, parts, rows)
    assert all(piece == [64 // pieces] * pieces for piece in cut)


def test_what_is_chosen_costs_least():
    """No worse than parts with room for all, whatever their lengths, nor than whole sequences."""
    generator = random.Random(1)
    for _ in range(30):
        blocks, parts = [generator.randrange(1, 200) for _ in range(generator.randrange(1, 200))], 66
        size, cut = _pieces(blocks, parts)
        partials = sum(len(pieces) for pieces in cut if len(pieces) > 1)
        cost = size * parts + (MERGE * parts + partials * partial_cost(64) if partials else 0)
        anywhere = (sum(blocks) + BEGIN * len(blocks)) // parts + BEGIN + 5
        assert cost <= anywhere * parts + MERGE * parts + (len(blocks) + 2 * parts) * partial_cost(64)
        if len(blocks) <= parts:
            assert cost <= max(blocks) * parts


@pytest.mark.parametrize("parts", [7, 66, 132])
def test_the_kernel_divides_alike(monkeypatch, parts):
    """Also lengths at the end of what is counted, of no keys and that cannot be."""
    run, generator = finish.function(BalancerOnCpu(), monkeypatch), random.Random(parts)
    cases = [[64] * (8 * parts), [64] * 16, [1], [5] * 50, [1 << 20], [(1 << 20) - 1], [3, 1 << 24, 9]]
    ends = [[(1 << 31) - 1, 7], [(1 << 31) - 65, 5], [(1 << 31) - 1] * 2, [0, -3, 1, -(1 << 31), 64, 65]]
    cases += [[generator.randrange(1, most) for _ in range(generator.randrange(1, 8 * min(parts, 16)))]
              for most in (2, 30, 200, 1 << 14) for _ in range(3)]
    for given in ends + [[n * 64 - generator.randrange(64) for n in blocks] for blocks in cases]:
        of = Planned(generator.choice((16, 128)), 1, 64, latent=True, together=2)
        n, lengths = len(given), torch.tensor(given, dtype=torch.int32)
        want, made = reference.plan_decode(lengths, None, of, parts), torch.zeros(of.words(n), dtype=torch.int32)
        made[words.LENGTHS:][:n] = lengths
        run(torch.zeros(n, 1, dtype=torch.int32), made, of.sizes(n, parts))
        assert made[:2].tolist() == want[[words.PART, words.TOTAL]].tolist()
        behind = words.prefix(n) + n
        assert torch.equal(made[words.STARTS:behind], want[words.STARTS:behind])


@pytest.mark.machine_code(recipe=lambda: of_name(shipped(), "plan_decode-latent").recipe)
def test_its_machine_code(machine_code):
    """All lanes of a warp ask together for what is the same in all of them: some alone would wait for ever."""
    wanted = of_name(shipped(), "plan_decode-latent").expectation
    sass.assert_sass(machine_code, wanted)
    assert "BRA.DIV" in wanted.absent


def test_plans_that_are_divided_otherwise():
    """Of batch-invariant calls, windows, several tiles of a block, many sequences, none, and other attention."""
    of = Planned(128, 1, 64, together=2, latent=True)
    assert of.balanced(64, 66) and of.balanced(528, 66) and not of.balanced(529, 66) and not of.balanced(0, 66)
    assert not of.balanced(2049, 512)
    for changed in dict(fixed=True), dict(left=5), dict(queries=9), dict(latent=False):
        assert not of._replace(**changed).balanced(64, 66)
    made = Planned.made((576, 512), (128, 1), (3, 2), False)
    assert made.latent and made.together == 4 and not Planned.made((128, 128), (8, 1), (3, 1), False).latent
