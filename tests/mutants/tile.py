"""Faults in the tile layer, which all kernels share."""
from .mutant import family, pressed

GEMM, ATTENTION, BACKWARD = (pressed(x) for x in ("naps-gemm", "naps-attention", "naps-backward_helper_warps"))
NEIGHBOURS = ("tests/cpu/linear_attention/test_neighbours_sass.py",)  # no run shows it: the compiled kernel does
MAILBOX = ("tests/gpu/tile/test_tile_sync.py::test_mailbox",)  # where nothing else holds the producer back

MUTANTS = (
    *family(
        "tile", "tkq/tile/sync.py",
        ("stages_of_another_phase", "return Int32((self.count[0] // self.stages) & 1)",
         "return Int32((self.count[0] // self.stages + 1) & 1)", GEMM),
        ("pipe_acquired_without_a_wait", '_wait("producer", self.empty[r.stage], r.phase ^ 1)', "", GEMM),
        ("pipe_read_without_a_wait", '_wait("consumer", self.full[r.stage], r.phase)', "", GEMM),
        ("mailbox_written_over", "wait(self.empty[r.stage], r.phase ^ 1)\nwith cute.arch.elect_one():",
         "with cute.arch.elect_one():", MAILBOX),
        ("mailbox_read_without_a_wait", """
            wait(self.full[r.stage], r.phase)
            return [cute.arch.make_warp_uniform(self.slots[f, r.stage]) for f in range(self.fields)]
         """, "return [cute.arch.make_warp_uniform(self.slots[f, r.stage]) for f in range(self.fields)]", MAILBOX),
        ("arrival_overtakes_what_is_read", "cute.arch.fence_acq_rel_cta()", "pass", NEIGHBOURS),
        ("empty_after_fewer_warps", "init(self.empty[i], self.consumers * self.cluster)",
         "init(self.empty[i], self.consumers * self.cluster // 2)", GEMM)),
    *family(
        "tile", "tkq/tile/shared.py",
        ("panel_of_another_stage", "return SharedTile(ring, type, self.stage * count + n)",
         "return SharedTile(ring, type, self.stage + n)", ("tests/gpu/tile/test_tile_memory.py::test_panels",))),
    *family(
        "backward", "tkq/attention/backward/tile_scheduler.py",  # which takes tasks from a mailbox by itself
        ("task_read_before_it_is_named", "tk.wait(s.tasks.full[ring.stage], ring.phase)", "", BACKWARD),
        ("task_not_given_back", "tk.arrive(s.tasks.empty[ring.stage])", "", BACKWARD)),
    *family(
        "tile", "tkq/tile/schedule.py",
        ("counter_not_back",
         "number = Int32(count_up(self.counter.iterator.toint(), Uint32(self.tasks - 1))) + self.workers()",
         "number = Int32(count_up(self.counter.iterator.toint(), Uint32(self.tasks))) + self.workers()", ATTENTION)),
)
