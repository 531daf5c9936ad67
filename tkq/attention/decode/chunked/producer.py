"""The producer warp of chunked prefill: it walks a sequence's pages, and brings their boxes of K and V."""
import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

import tkq.tile as tk
from tkq.attention.decode import words
from tkq.attention.decode.chunked.softmax import AHEAD, FAULT
from tkq.attention.forward.producer import Producer

WARP = 32


class PagedProducer:
    """A lane looks up one box's page, a block before it is copied; its place reaches all lanes by shuffles. Boxes that
    are not there are asked for at page -1, and come as zeros: so all stages have the same bytes."""

    def __init__(self, spec, cache, config):
        self.spec, self.cache, self.config = spec, cache, config
        self.forward = Producer(spec, config)  # of Q, and of what a task sees
        self.boxes = config.kv // cache.box

    @cute.jit
    def run(self, g, smem):
        tk.prefetch(g.q, g.k, g.v, *[g.o] * (not self.config.o_from_registers))
        k_ring, v_ring, q_ring = smem.k_pipe.ring(), smem.v_pipe.ring(), tk.ring(self.config.q_stages)
        word_ring = tk.ring(self.config.stages + AHEAD)
        k_boxes, v_boxes = smem.k.scratch(g.k.type), smem.v.scratch(g.v.type)
        tasks, schedule = g.tasks.begin(g.schedule)
        number = schedule.first()
        while number < schedule.tasks:
            t, wrong = tasks.find(number)
            seen = self.forward.seen(g, t)
            last, head = seen.first + seen.blocks - 1, t.head // tasks.heads_per_kv
            page, row = Int32(-1), Int32(0)
            if t.rows_q > 0:  # of ragged queries there may be fewer tiles than a plan has room for
                wrong = self.all_of_sequence(g, t, seen, wrong)
                found = self.find(g, t, last)
                page, row, word = self.judge(g, *found)
                found = self.find(g, t, last - 1)
                self.load_k(smem, k_boxes, g.k, (k_ring, word_ring), (page, row, head), word, wrong)
                self.forward.load_q(g, smem, q_ring, t, seen)
                asked_page, asked_row, asked = found
                for j in cutlass.range(1, seen.blocks, unroll=1):
                    page_k, row_k, word = self.judge(g, asked_page, asked_row, asked)
                    asked_page, asked_row, asked = self.find(g, t, last - j - 1)
                    self.load_k(smem, k_boxes, g.k, (k_ring, word_ring), (page_k, row_k, head), word, Int32(0))
                    self.load_v(smem, v_boxes, g.v, v_ring, (page, row, head))
                    page, row = page_k, row_k
            fetched = schedule.fetch()  # as late as in the forward
            if t.rows_q > 0:
                self.load_v(smem, v_boxes, g.v, v_ring, (page, row, head))
            number = schedule.following(number, fetched)
        self.forward.close(smem, q_ring)

    @cute.jit
    def find(self, g, t, block):
        """(page, row of the page in boxes, is there such a key?) of this lane's box. The page is looked at a block
        later: nothing waits for it here."""
        key = block * self.config.kv + tk.lane_id() * self.cache.box
        asked = (tk.lane_id() < self.boxes) & (key >= 0) & (key < t.rows_k)
        page, row, table = t.batch_k, block, g.tasks.table
        if const_expr(self.cache.paged):
            number = key // g.tasks.sizes.page
            row = (key - number * g.tasks.sizes.page) // self.cache.box
            if asked:
                page = table[t.batch_k, number]
        return page, row, asked

    def judge(self, g, page, row, asked):
        """(page or -1, row, the block's word)"""
        pages = g.tasks.sizes.pages
        there = asked & (page >= 0) & (page < pages)
        word = Int32(0)
        if self.cache.paged:
            word = cute.arch.vote_ballot_sync(asked & ((page < 0) | (page >= pages)))
            word = word | self.fault(g, asked & ((page < -1) | (page >= pages)))
        return cutlass.select_(there, page, Int32(-1)), cutlass.select_(there, row, Int32(0)), word

    @cute.jit
    def fault(self, g, bad):
        """FAULT where a lane has found a page that cannot be; the plan says so."""
        found, plan = cute.arch.vote_any_sync(bad), g.tasks.results.plan
        if found:
            if tk.lane_id() == 0:
                plan[words.BAD_PAGE] = Int32(1)
        return cutlass.select_(found, Int32(FAULT), Int32(0))

    @cute.jit
    def all_of_sequence(self, g, t, seen, wrong):
        """FAULT where a sequence says something wrong; of queries that are not ragged also by pages that this task
        alone does not see."""
        word = cutlass.select_(wrong != 0, Int32(FAULT), Int32(0))
        if const_expr(self.cache.paged and not self.cache.ragged):
            sizes, table, bad = g.tasks.sizes, g.tasks.table, cutlass.Boolean(False)
            for begin, end in g.tasks.unseen(t, seen, self.config.kv):
                first = begin // sizes.page
                for i in cutlass.range(first + tk.lane_id(), (end + sizes.page - 1) // sizes.page, WARP, unroll=1):
                    page = table[t.batch_k, i]
                    bad = bad | (page < -1) | (page >= sizes.pages)
            word = word | self.fault(g, bad)
        return word

    @cute.jit
    def load_k(self, smem, boxes, src, rings, place, word, more):
        ring, word_ring, found = *rings, smem.words
        if tk.lane_id() == 0:
            found[0, word_ring.stage] = word | more
        cute.arch.sync_warp()  # before the arrival of whichever lane
        word_ring.advance()
        self.load(boxes, src, smem.k_pipe, ring, place)

    def load_v(self, smem, boxes, src, ring, place):
        self.load(boxes, src, smem.v_pipe, ring, place)

    def load(self, boxes, src, pipe, ring, place):
        """A tile of K or V, box by box: a tile's panels have all of its rows one behind the other."""
        (page, row, head), sem = place, pipe.acquire(ring)
        panels = boxes.stages // pipe.stages // self.boxes
        for j in range(self.boxes):
            of, at = cute.arch.shuffle_sync(page, j), cute.arch.shuffle_sync(row, j)
            for panel in range(panels):
                where = (ring.stage * panels + panel) * self.boxes + j
                tk.load_async(boxes[where], src, (of, head, at, panel), sem)
        ring.advance()
