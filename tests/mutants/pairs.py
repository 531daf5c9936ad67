"""Faults in blocks of linear attention that have two heads, in warps that make factors, and in concurrent launches."""
from .mutant import family, pressed

TESTS = "tests/gpu/linear_attention/"
PAIRS = (f"{TESTS}test_heads.py::test_mamba2[128-64-310-without1]",)
SEGMENTS = (f"{TESTS}test_heads.py::test_segments[1000-5-token-False-64]",)
SPLIT = (f"{TESTS}test_split.py::test_gates_of_tokens[1000-5]",)

TOGETHER, WAITS = ((f"{TESTS}test_concurrent_launches.py::{name}",) for name in (
    "test_the_same_bits[mamba2_ssd]", "test_streams_wait_for_each_other"))

MUTANTS = (
    *family(
        "linear", "tkq/linear_attention/engine/factors.py",
        ("factors_of_the_first_chunk", "self.gate.follow(g, t, visited(t, i + every, reverse), numbers)", "pass",
         PAIRS),
        ("factors_written_over",
         "s.scores.acquire_empty(room)\nself.gate.sums(g, logs, s.gate, self.heads.place_of_warp(room))",
         "self.gate.sums(g, logs, s.gate, self.heads.place_of_warp(room))", pressed("reads-linear_pairs")),
        ("factors_alone_from_the_first_stage", "room.count[0] = Uint32(first)", "room.count[0] = Uint32(0)", SPLIT),
        ("factors_not_waited_for",
         "tk.sync(self.ping_pong.barrier(self.barrier, wg), tk.WARPGROUP + 32 * self.count)", "",
         pressed("naps-linear_pairs"))),
    *family(
        "linear", "tkq/linear_attention/engine/heads.py",
        ("values_of_the_first_head", "return replace(t, head=t.head + wg, head_v=(t.head + wg) // g.heads_per_v, "
         "part=t.part - wg)", "return replace(t, head=t.head + wg, part=t.part - wg)", PAIRS),
        ("states_of_the_first_head", "return replace(t, head=t.head + wg, head_v=(t.head + wg) // g.heads_per_v, "
         "part=t.part - wg)", "return replace(t, head_v=(t.head + wg) // g.heads_per_v, part=t.part - wg)", PAIRS),
        ("gates_of_the_first_head", "return t if self.count == 1 else replace(t, head=t.head + self.head_of_warp())",
         "return t", PAIRS),
        ("factors_of_the_first_head_alone",
         "return (tk.warp_id() % WARPS - (0 if self.all_warps else FACTORS)) % self.count", "return tk.warp_id() * 0",
         PAIRS),
        ("factors_alone_from_the_second_chunk", "return tk.warp_id() % WARPS // self.count if self.all_warps else 0",
         "return tk.warp_id() % WARPS if self.all_warps else 0", SEGMENTS),
        ("scores_of_the_first_head", "return scores.stage if self.count == 1 else self.count * scores.stage + head",
         "return scores.stage if self.count == 1 else self.count * scores.stage + 0 * head", PAIRS)),
    *family(
        "linear", "tkq/linear_attention/engine/kernel.py",
        ("decays_of_the_first_head", "self.segmented.decay(decay, s.gate, self.heads.place(scores, wg))",
         "self.segmented.decay(decay, s.gate, scores.stage)", SEGMENTS),
        ("factors_of_one_head_are_enough", "al.pipe(c.score_stages, 0, 4 * n, producers=warps or c.heads))",
         "al.pipe(c.score_stages, 0, 4 * n, producers=warps or 1))", SEGMENTS)),
    *family(
        "linear", "tkq/linear_attention/split/concurrent.py",
        ("streams_begin_at_once", "stream.wait_stream(current)", "pass", WAITS),
        ("streams_are_not_waited_for", "current.wait_stream(stream)", "pass", WAITS),
        ("one_after_the_other", "hows = _worth([given for given, _ in there])", "hows = None", TOGETHER)),
)
