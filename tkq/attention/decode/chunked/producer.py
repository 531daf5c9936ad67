"""The producer warps of chunked prefill: they walk a sequence's pages, and bring their boxes of K and V."""
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

import tkq.tile as tk
from tkq.attention.decode import words
from tkq.attention.decode.chunked.plan import producer_warps
from tkq.attention.decode.chunked.softmax import AHEAD, FAULT
from tkq.attention.forward.producer import Producer

WARP = 32
NO_BOX = -(1 << 30)  # of lanes beyond a tile's boxes: before the first one of any sequence, whatever the block
LOOKS = 4  # pages that a lane asks for at a time, of those that a task does not see
BARRIER = 7  # of the producer warps


class PagedProducer:
    """A lane looks up one box's page, a block before it is copied; its place reaches all lanes by shuffles. Boxes that
    are not there are asked for at page -1, and come as zeros: so all stages have the same bytes.

    Small boxes are dealt out to several warps, each of which goes through the same tasks. The first one fetches tasks,
    brings Q, announces stages and writes the blocks' words. What another warp's copies bring may be counted before the
    stage is announced: its semaphore waits for the announcement all the same."""

    def __init__(self, spec, cache, config):
        self.spec, self.cache, self.config = spec, cache, config
        self.forward = Producer(spec, config)  # of Q, and of what a task sees
        self.boxes, self.box_groups = config.kv // cache.box, cache.box // 8
        self.warps = producer_warps(self.boxes)

    @cute.jit
    def run(self, g, smem):
        me = tk.warp_id()
        if me == 0:
            tk.prefetch(g.q, g.k, g.v, *[g.o] * (not self.config.o_from_registers))
        k_ring, v_ring, q_ring = smem.k_pipe.ring(), smem.v_pipe.ring(), tk.ring(self.config.q_stages)
        word_ring, slot = tk.ring(self.config.stages + AHEAD), tk.ring(2)
        k_boxes, v_boxes = smem.k.scratch(g.k.type), smem.v.scratch(g.v.type)
        tasks, schedule = g.tasks.begin(g.schedule)
        number, steps = schedule.first(), self.steps(g)
        while number < schedule.tasks:
            t, wrong = tasks.find(number)
            seen = self.forward.seen(g, t)
            last, head = seen.first + seen.blocks - 1, t.head // tasks.heads_per_kv
            at = self.nowhere()
            if t.rows_q > 0:  # of ragged queries there may be fewer tiles than a plan has room for
                place, pages = self.place(last, steps), self.pages(g, t)
                found = self.find(t, pages, place)
                more = self.all_of_sequence(g, t, seen, (wrong, me))
                at, word = self.judge(g, *found)
                place = self.before(place, steps)
                found = self.find(t, pages, place)
                self.tell(smem, word_ring, word | more, me)
                self.load(k_boxes, g.k, smem.k_pipe, k_ring, (at, head, me))
                if me == 0:
                    self.forward.load_q(g, smem, q_ring, t, seen)
                for _ in cutlass.range(1, seen.blocks, unroll=1):
                    at_k, word = self.judge(g, *found)
                    place = self.before(place, steps)
                    found = self.find(t, pages, place)
                    self.tell(smem, word_ring, word, me)
                    self.load(k_boxes, g.k, smem.k_pipe, k_ring, (at_k, head, me))
                    self.load(v_boxes, g.v, smem.v_pipe, v_ring, (at, head, me))
                    at = at_k
            fetched = Int32(0)
            if me == 0:
                fetched = schedule.fetch()  # as late as in the forward
            if t.rows_q > 0:
                self.load(v_boxes, g.v, smem.v_pipe, v_ring, (at, head, me))
            number = self.shared(smem, slot, schedule.following(number, fetched), me)
        if me == 0:
            self.forward.close(smem, q_ring)

    @cute.jit
    def shared(self, smem, slot, number, me):
        """The first warp's number, for all of them."""
        if const_expr(self.warps > 1):
            numbers = smem.numbers
            if me == 0 and tk.lane_id() == 0:
                numbers[0, slot.stage] = number
            tk.sync(BARRIER, WARP * self.warps)
            number = cute.arch.make_warp_uniform(numbers[0, slot.stage])
            slot.advance()
        return number

    def steps(self, g):
        """(boxes of a page, pages and boxes more from one block to the next)"""
        if not self.cache.paged:
            return Int32(1), Int32(1), Int32(0)
        each = g.tasks.sizes.page // self.cache.box
        pages = self.boxes // each
        return each, pages, self.boxes - pages * each

    def place(self, block, steps):
        """(page of the sequence, box of the page, box of the sequence): this lane's of a block."""
        lane = tk.lane_id()
        box = block * self.boxes + cutlass.select_(lane < self.boxes, lane, Int32(NO_BOX))
        number = box // steps[0]
        return number, box - number * steps[0], box

    def before(self, place, steps):
        """The place in the block before, without a division."""
        (number, row, box), (each, pages, boxes) = place, steps
        row = row - boxes
        under = row < 0
        return (number - pages - cutlass.select_(under, Int32(1), Int32(0)),
                row + cutlass.select_(under, each, Int32(0)), box - self.boxes)

    def pages(self, g, t):
        """A task's row of the table."""
        return g.tasks.table[t.batch_k, None] if self.cache.paged else None

    @cute.jit
    def find(self, t, pages, place):
        """(page, row of the page in boxes, is there such a key?) of this lane's box. The page is looked at a block
        later: nothing waits for it here."""
        number, row, box = place
        # as numbers without a sign, boxes before the first one are behind the last
        asked = Uint32(box) < Uint32(t.rows_k + self.cache.box - 1) // self.cache.box
        page = t.batch_k
        if const_expr(self.cache.paged):
            if asked:
                page = pages[number]
        else:
            row = box
        return page, row, asked

    def nowhere(self):
        """Where no row is: (page, box of it), in groups of 8 rows (the first one,)."""
        return (Int32(-self.box_groups),) if self.cache.row_groups else (Int32(-1), Int32(0))

    def judge(self, g, page, row, asked):
        """(where the box is, or `nowhere`; the block's word)"""
        there, word = asked, Int32(0)
        if self.cache.paged:
            known = Uint32(page) < Uint32(g.tasks.sizes.pages)  # of 0 and more
            there, missing = asked & known, asked & ~known
            word = cute.arch.vote_ballot_sync(missing)
            word = word | self.fault(g, missing & (page != -1))
        at = (page * g.tasks.sizes.groups + row * self.box_groups,) if self.cache.row_groups else (page, row)
        return tuple(cutlass.select_(there, x, none) for x, none in zip(at, self.nowhere())), word

    @cute.jit
    def fault(self, g, bad):
        """FAULT where a lane has found a page that cannot be; the plan says so."""
        found, plan = cute.arch.vote_any_sync(bad), g.tasks.results.plan
        if found:
            if tk.lane_id() == 0:
                plan[words.BAD_PAGE] = Int32(1)
        return cutlass.select_(found, Int32(FAULT), Int32(0))

    @cute.jit
    def all_of_sequence(self, g, t, seen, given):
        """FAULT where a sequence says something wrong; of queries that are not ragged also by pages that this task
        alone does not see. The first warp's."""
        wrong, me = given
        word = cutlass.select_(wrong != 0, Int32(FAULT), Int32(0))
        if const_expr(self.cache.paged and not self.cache.ragged):
            if me == 0:
                sizes, table, bad = g.tasks.sizes, g.tasks.table, cutlass.Boolean(False)
                for begin, end in g.tasks.unseen(t, seen, self.config.kv, self.spec.left):
                    after = (end + sizes.page - 1) // sizes.page
                    for i in cutlass.range(begin // sizes.page + tk.lane_id(), after, WARP * LOOKS, unroll=1):
                        pages = cute.make_rmem_tensor((LOOKS,), Int32)
                        for j in cutlass.range_constexpr(LOOKS):  # all asked for before the first is looked at
                            pages[j] = Int32(-1)
                            if i + j * WARP < after:
                                pages[j] = table[t.batch_k, i + j * WARP]
                        for j in cutlass.range_constexpr(LOOKS):
                            bad = bad | (pages[j] < -1) | (pages[j] >= sizes.pages)
                word = word | self.fault(g, bad)
        return word

    @cute.jit
    def tell(self, smem, ring, word, me):
        """The consumers, of a block of keys: before K's stage is announced."""
        found = smem.words
        if me == 0 and tk.lane_id() == 0:
            found[0, ring.stage] = word
        cute.arch.sync_warp()  # the announcement may be another lane's
        ring.advance()

    def load(self, boxes, src, pipe, ring, place):
        """A warp's boxes of a tile of K or V. Each of a tile's panels has all of its rows one behind the other; in
        groups of 8 rows a box has all panels."""
        at, head, me = place
        self.acquire(pipe, ring, me)
        for j in range(0, self.boxes, self.warps):
            box = j + me if self.warps > 1 else Int32(j)
            of = tuple(cute.arch.shuffle_sync(x, box) for x in at)
            if j + self.warps <= self.boxes:
                self.copy(boxes, src, pipe, ring, (box, of, head))
            else:
                self.copy_if(boxes, src, pipe, ring, (box, of, head))
        ring.advance()

    @cute.jit
    def acquire(self, pipe, ring, me):
        """The stage, free; the first warp announces its bytes."""
        if me == 0:
            pipe.acquire(ring)
        else:
            pipe.acquire_empty(ring)

    def copy(self, boxes, src, pipe, ring, place):
        box, at, head = place
        panels = boxes.stages // pipe.stages // self.boxes
        for panel in range(panels):
            where = (ring.stage * panels + panel) * self.boxes + box
            if self.cache.row_groups:
                tk.load_async(boxes[where], src.rows_from(at[0]), (head, 0, 0), pipe.full[ring.stage])
            else:
                tk.load_async(boxes[where], src, (at[0], head, at[1], panel), pipe.full[ring.stage])

    @cute.jit
    def copy_if(self, boxes, src, pipe, ring, place):
        if place[0] < self.boxes:
            self.copy(boxes, src, pipe, ring, place)
