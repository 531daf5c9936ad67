"""Query heads that share a K/V head, with helper warps: in which order parts come; no block waits forever."""
import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tkq.attention.backward.kernel import refuse
from tkq.attention.backward.plan import _GQA, plan
from tkq.attention.backward.spec import WIDTHS, BackwardSpec
from tkq.attention.common.query_mask import tile_of_task
from tkq.attention.common.tile_order import part_in_order, zero_ahead_of
from tkq.attention.forward.plan import LENGTHS

BY_QUERY_HEAD = _GQA[128]


def tasks_of(kv_heads, splits_per_kv_head, blocks, l2_section, tail_heads, tail_waves=1):
    """(part, block), as blocks claim them."""
    parts = kv_heads * splits_per_kv_head
    order = [tile_of_task(i, blocks, parts, l2_section, True, tail_heads * tail_waves) for i in range(parts * blocks)]
    return [(part_in_order(head, parts, splits_per_kv_head, l2_section, tail_heads), block) for head, block in order]


SIZES = dict(kv_heads=st.integers(1, 7), splits_per_kv_head=st.integers(1, 4), blocks=st.integers(1, 5),
             l2_section=st.integers(1, 9),
             tail_heads=st.integers(1, 12))


@given(**SIZES)
def test_parts_come_one_after_the_other(kv_heads, splits_per_kv_head, blocks, l2_section, tail_heads):
    """So a task may wait for the parts before it: they have been claimed."""
    heads = kv_heads * splits_per_kv_head
    order = tasks_of(kv_heads, splits_per_kv_head, blocks, min(l2_section, heads), tail_heads)
    assert sorted(order) == [(head, block) for head in range(heads) for block in range(blocks)]
    begun = {task: i for i, task in enumerate(order)}
    assert all(begun[head - 1, block] < begun[head, block] for head, block in order if head % splits_per_kv_head)


def test_the_first_parts_of_some_heads_come_before_their_second_ones():
    order = [part_in_order(i, 10, 2, 1, 3) for i in range(10)]
    assert order == [0, 2, 1, 3, 4, 6, 5, 7, 8, 9]


class Machine:
    """Blocks that claim tasks, and beside each a warp that zeroes and finishes tiles, as ``GqaBackward`` has them.
    Each is a generator that yields what it waits for."""

    def __init__(self, order, splits_per_kv_head, of_part, tiles, zero_ahead):
        self.order, self.splits_per_kv_head, self.of_part = order, splits_per_kv_head, of_part
        self.tiles, self.zero_ahead = tiles, zero_ahead
        self.blocks = 1 + max(block for _, block in order)
        self.parts = 1 + max(part for part, _ in order)
        self.claimed, self.zeroed, self.finishing, self.finished = 0, 0, 0, 0
        self.ready, self.added = ([0] * (self.parts * of_part) for _ in range(2))
        self.dkv_partials = {}
        seen = list(dict.fromkeys(part for part, _ in order))
        assert sorted(seen) == list(range(self.parts))

    def heads_in_order(self, turn):
        return [turn(i) * self.of_part + h for i in range(self.parts) for h in range(self.of_part)]

    def block(self, heads):
        while self.claimed < len(self.order):
            part, block = self.order[self.claimed]
            self.claimed += 1
            for head in range(part * self.of_part, (part + 1) * self.of_part):
                while self.ready[head] < self.tiles:
                    yield
                self.added[head] += 1
                yield None
            kv_head, number = divmod(part, self.splits_per_kv_head)
            while self.dkv_partials.get((kv_head, block), 0) < number:
                yield
            self.dkv_partials[kv_head, block] = number + 1
        yield from self.behind(heads)

    def behind(self, heads):
        end, zeroed = len(heads) * self.tiles, 0
        while self.finishing < end:
            n = self.finishing
            self.finishing += 1
            goal = min(n + self.zero_ahead, end)
            while zeroed < goal:
                zeroed, self.zeroed = self.zeroed, self.zeroed + 1
                if zeroed < end:
                    self.ready[heads[zeroed // self.tiles]] += 1
                zeroed += 1
            if n >= end:
                return
            head = heads[n // self.tiles]
            while self.ready[head] < self.tiles or self.added[head] < self.blocks:
                yield
            self.finished += 1

    def run(self, num_sms, heads, turns):
        """turns: which block goes on, of those that can; the rest take it in order."""
        going = [work for _ in range(num_sms) for work in (self.block(heads), self.behind(heads))]
        for step in range(100000):
            before = self.claimed, self.zeroed, self.finishing, self.finished, sum(self.added), sum(
                self.dkv_partials.values()), len(going)
            first = turns[step % len(turns)] % len(going)
            for work in going[first:] + going[:first]:
                try:
                    next(work)
                except StopIteration:
                    going.remove(work)
            if not going:
                return
            after = self.claimed, self.zeroed, self.finishing, self.finished, sum(self.added), sum(
                self.dkv_partials.values()), len(going)
            assert after != before, "all wait"


@given(**SIZES, of_part=st.integers(1, 3), tiles=st.integers(1, 3), num_sms=st.integers(1, 6),
       tail_waves=st.integers(1, 2), turns=st.lists(st.integers(0, 20), min_size=1, max_size=8))
@settings(max_examples=80)
def test_no_block_waits_forever(kv_heads, splits_per_kv_head, blocks, l2_section, tail_heads, of_part, tiles, num_sms,
                                tail_waves, turns):
    l2_section = min(l2_section, kv_heads * splits_per_kv_head)
    order = tasks_of(kv_heads, splits_per_kv_head, blocks, l2_section, tail_heads, tail_waves)
    machine = Machine(order, splits_per_kv_head, of_part, tiles,
                      zero_ahead_of(l2_section, tail_heads, of_part * tiles) * tail_waves)
    heads = machine.heads_in_order(lambda i: part_in_order(i, kv_heads * splits_per_kv_head, splits_per_kv_head,
                                                           l2_section, tail_heads))
    machine.run(num_sms, heads, turns)
    assert machine.finished == len(heads) * tiles


def test_a_model_that_hangs_is_found():
    """Zeroes in another order than the tasks', and none ahead."""
    order = tasks_of(4, 2, 2, 2, 1)
    machine = Machine(order, 2, 1, 1, 1)
    with pytest.raises(AssertionError, match="all wait"):
        machine.run(1, list(range(7, -1, -1)), [0])


@given(length=st.sampled_from(LENGTHS), group=st.integers(1, 9), varlen=st.booleans(), width=st.sampled_from(WIDTHS),
       right=st.booleans(), left=st.booleans(), softcap=st.booleans(), deterministic=st.booleans())
def test_planned_for_shared_heads_alone(length, group, **options):
    """Of sequences that are not packed, and with what ``by_query_head`` takes."""
    spec = BackwardSpec(**options)
    config = plan(spec, length, group)
    if config.by_query_head:
        assert group > 1 and not (spec.varlen or spec.left or spec.softcap or spec.deterministic)
        assert not config.heads_per_task or (group % config.heads_per_task == 0 and group > config.heads_per_task
                                             and spec.right)


@given(st.integers(1, 100_000), st.integers(1, 9))
def test_the_workspace_has_room_for_the_counters(rows, heads):
    """Behind the accumulator, which begins at a multiple of 16 bytes: two of as many query heads as there are tiles,
    and one more; and the kernel before, which clears 8 for each tile, clears them all."""
    config, spec = BY_QUERY_HEAD, BackwardSpec(right=True)
    tiles = heads * -(-rows // config.tile)
    end = -(-(tiles * 2 * config.tile) // 4) * 4 + tiles * config.tile * spec.width
    assert end + 3 + 2 * (tiles + 1) <= heads * config.workspace_floats(spec, rows)
    assert 3 + 2 * (tiles + 1) <= 8 * tiles


def test_what_cannot_run_is_refused():
    dataclasses.replace(BY_QUERY_HEAD, heads_per_task=2).check(128)
    for wrong, words in (
            ({"helper_warps": False}, "by_query_head needs helper_warps"),
            ({"dq_reduce": "atomic"}, "dq_reduce bulk or first_store"),
            ({"tail_waves": 0}, "tail_waves is 1 or more"),
            ({"by_query_head": False, "tail_waves": 2, "heads_per_task": 0}, "needs by_query_head"),
            ({"by_query_head": False, "heads_per_task": 2}, "heads_per_task needs by_query_head"),
            ({"by_query_head": False, "dq_reduce": "first_store"}, "first_store needs by_query_head"),
            ({"fuse_preprocess": True}, "without by_query_head"),
            ({"persistent": False}, "persistent")):
        with pytest.raises(ValueError, match=words):
            dataclasses.replace(BY_QUERY_HEAD, **wrong).check(128)
    with pytest.raises(ValueError, match="by_query_head.*two dK/dV warpgroups"):
        dataclasses.replace(BY_QUERY_HEAD, block=64, stages=1, registers=(24, 72, 208, 208),
                            ping_pong=False).check(256)
    for wrong in ({"varlen": True}, {"left": True}):
        with pytest.raises(NotImplementedError, match="by_query_head, of packed sequences"):
            refuse(BackwardSpec(right=True, **wrong), BY_QUERY_HEAD)
