"""How tkq times GPU code: `compare` sets callables side by side on the same inputs. The benchmarks and the demo use it.

What makes a comparison fair, and what this module does about it:

- **The L2 cache**: a set of inputs smaller than the cache would be read from it; calls rotate over several sets
  (and as many outputs) that together exceed it three times, as far as memory goes. And before each turn other memory,
  more than the cache holds, is written: a kernel whose loads and stores leave the cache first pushes nothing else out
  of it, and what a candidate before it left there, a part of these inputs, would be read there for all its turn. What
  was left to stay (`evict_last`) is released before that.
- **The host**: calls are captured in a CUDA graph and replayed, so that no launch gap is timed. What cannot be captured
  is timed between two events behind a kernel that holds the GPU while the host queues all calls.
- **Clock and power**: an H100 is power limited, and its clock moves by several per cent within a second. So candidates
  take turns, every turn lasts equally long, begins with an untimed lead-in of the same candidate of up to 10 ms, and
  the order changes every round. At the power limit neighbours share the clock all the same: turns of a second or more
  show each by itself. What counts is a ratio within a round; `ratio` is its median over the rounds.
- **The launch before**: of calls that follow each other, one with a programmatic dependent launch begins while the one
  before it ends, which is one of the same kernel here and rarely is in a program. `Effort.short_us` times short ones
  once more with a kernel of another kind before each call (`tkq.testing.timing_between`).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from tkq.runtime.device import driver
from tkq.testing import timing_between, timing_launches
from tkq.testing.timing_turns import calls_per_batch, take_turns, turn_order  # noqa: F401  turn_order: for benchmarks

L2_MULTIPLE = 3
CLEARED_MULTIPLE = 4  # of the cache, written before a turn
MOST_SETS = 64
HOST_SECONDS = 0.01  # of eager calls, to time the host
HOST_LEAD_IN = 3  # eager calls before those: after a rest the host is slow at first


@dataclass(frozen=True)
class Effort:
    """How long and how to measure.

    round_seconds: one candidate's turn; 0.04 s shows burst speed, a second or more sustained.
    idle_seconds: rest before each turn that counts: bursts after idle, for a card that is warm by the time others end.
    host: whether to time the host's side of eager calls too.
    graphs: False times eager calls behind a backlog even where a CUDA graph could be captured.
    short_us: where the fastest candidate takes fewer microseconds, all are timed once more between other kernels.
    """

    rounds: int = 9
    round_seconds: float = 0.04
    warmup_seconds: float = 0.25
    graphs: bool = True
    idle_seconds: float = 0.0
    host: bool = False
    short_us: float = 0.0

    def __post_init__(self):
        if self.rounds < 7:
            raise ValueError(f"rounds: at least 7, so that a median means something; got {self.rounds}")


BURST = Effort()


@dataclass(frozen=True)
class Timing:
    """One candidate's measurement: milliseconds per call, one for each round, calls back to back.

    mode: "graph" (CUDA-graph replay), "events" (eager calls behind a backlog) or "failed", where `note` says why.
    launches: kernels, copies and memsets per call; None where they could not be counted.
    error: what `compare`'s `error` returned for this candidate's output; None where none was asked for.
    host_us: microseconds of the host for one eager call; None where it was not asked for.
    between_ms: the same as times_ms, with a kernel of another kind before each call, whose own time is taken off; empty
        where that was not timed.
    """

    name: str
    mode: str
    times_ms: tuple[float, ...] = ()
    launches: float | None = None
    error: float | None = None
    note: str = ""
    host_us: float | None = None
    between_ms: tuple[float, ...] = ()

    @property
    def ok(self) -> bool:
        return bool(self.times_ms)

    @property
    def median_ms(self) -> float:
        return statistics.median(self.times_ms)

    @property
    def quartiles_ms(self) -> tuple[float, float]:
        low, _, high = statistics.quantiles(self.times_ms, n=4, method="inclusive")
        return low, high


@dataclass(frozen=True)
class Comparison:
    """Candidates timed in turn: `sets` input sets of `set_bytes` bytes rotated, to exceed a cache of `l2_bytes`."""

    timings: tuple[Timing, ...]
    sets: int
    set_bytes: int
    l2_bytes: int

    def __getitem__(self, name: str) -> Timing:
        return next(t for t in self.timings if t.name == name)

    @property
    def beyond_l2(self) -> bool:
        return self.sets * self.set_bytes >= L2_MULTIPLE * self.l2_bytes


def ratio(ours: Timing, other: Timing) -> float:
    """How many times faster `ours` is: the median over the rounds of (other's time / our time in the same round)."""
    if len(ours.times_ms) != len(other.times_ms):
        raise ValueError(f"{ours.name} has {len(ours.times_ms)} rounds, {other.name} has {len(other.times_ms)}")
    return statistics.median(b / a for a, b in zip(ours.times_ms, other.times_ms, strict=True))


def relative_error(output: torch.Tensor, wanted: torch.Tensor) -> float:
    """||output - wanted|| / ||wanted|| in wanted's type; a NaN anywhere makes it NaN."""
    return ((output.to(wanted.dtype) - wanted).norm() / wanted.norm()).item()


def input_sets(set_bytes: int, l2_bytes: int, free_bytes: int) -> int:
    """How many input sets to rotate: at least 2 and more than 3x L2 together, at most 64 and 30 % of free memory."""
    wanted = max(2, math.ceil(L2_MULTIPLE * l2_bytes / max(1, set_bytes)))
    affordable = int(0.3 * free_bytes) // max(1, set_bytes)
    return max(1, min(wanted, affordable, MOST_SETS))


def tensor_bytes(values) -> int:
    """Bytes that the tensors among `values` store; views of one storage count once."""
    storages = [v.untyped_storage() for v in values if isinstance(v, torch.Tensor)]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def compare(
    candidates: Mapping[str, Callable],
    make_inputs: Callable[[int], tuple],
    effort: Effort = BURST,
    *,
    error: Callable[[str, tuple, object], float | None] | None = None,
    during: Callable[[str], None] | None = None,
    gpu=None,
) -> Comparison:
    """Time every candidate, called as `candidate(*inputs)`, on the same rotating inputs, in turns; gradients are off.

    make_inputs(i): the i-th set of inputs, a tuple. error(name, inputs, output): a float, or None, once per candidate
    before the clock runs. during(name): called while the GPU works on that candidate's turn (to read clock and power).
    gpu: what measures; the current CUDA device unless a test puts its own in place.

    A candidate that raises is reported with mode "failed" and the exception as its note; the others go on.
    """
    gpu = gpu or Gpu()
    with torch.no_grad():
        gpu.clear_cache()  # takes its memory before the inputs take the rest
        first = make_inputs(0)
        set_bytes, l2_bytes = tensor_bytes(first), gpu.l2_bytes()
        count = input_sets(set_bytes, l2_bytes, gpu.free_bytes())
        sets = [first, *(make_inputs(i) for i in range(1, count))]
        failed, errors, batches, host = {}, {}, {}, {}
        for name, call in candidates.items():
            try:
                output, seconds = gpu.first_calls(call, sets)
                errors[name] = None if error is None else error(name, first, output)
                del output
                if effort.host:
                    host[name] = gpu.host_us(call, sets, seconds)
                calls = calls_per_batch(seconds, count, effort.round_seconds)
                batches[name] = gpu.batch(call, sets, calls, effort.graphs)
            except Exception as problem:  # whatever a peer raises, the others are still worth timing
                failed[name] = f"{type(problem).__name__}: {str(problem)[:300]}"
        times = take_turns(batches, failed, effort, during, gpu.clear_cache)
        working = {name: candidates[name] for name in batches if name not in failed}
        between = timing_between.times(working, sets, times, effort, gpu)
        timings = tuple(
            Timing(name, "failed", error=errors.get(name), note=failed[name])
            if name in failed
            else Timing(name, b.mode, tuple(times[name]), b.launches, errors[name], b.note, host.get(name),
                        between.get(name, ()))
            for name in candidates
            for b in [batches.get(name)]
        )
        batches.clear()
        gpu.release()
    return Comparison(timings, count, set_bytes, l2_bytes)


class Gpu:
    """Measures on the current CUDA device."""

    def __init__(self):
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        self._others = None

    def l2_bytes(self) -> int:
        return torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info()[0]

    def clear_cache(self) -> None:
        """Leave no candidate's inputs in the L2 cache: queue writes to other memory, a tenth of a millisecond of them.
        Lines that were read to stay there (`evict_last`, as torch.compile does where it reads rows twice) would
        outlast them, and the next candidate would find them at each of its calls: they become lines like others first.
        """
        torch.cuda.synchronize()
        driver.ask("cuCtxResetPersistingL2Cache")
        if self._others is None:
            self._others = torch.empty(CLEARED_MULTIPLE * self.l2_bytes() // 4, dtype=torch.int32, device="cuda")
        self._others.fill_(1)

    def foreign(self) -> Callable[[], None]:
        """Launches a short elementwise kernel of torch's, which nothing overlaps with."""
        return torch.zeros(timing_between.FOREIGN_BYTES // 4, dtype=torch.int32, device="cuda").neg_

    def first_calls(self, call, sets) -> tuple[object, float]:
        """The output for set 0 and the seconds a call takes, after compilation and the first touch of every set."""
        output = call(*sets[0])
        torch.cuda.synchronize()
        for inputs in sets:
            call(*inputs)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for inputs in sets:
            call(*inputs)
        torch.cuda.synchronize()
        return output, (time.perf_counter() - begin) / len(sets)

    def host_us(self, call, sets, seconds: float) -> float:
        """The median microseconds until an eager call returns; the GPU may still be at work on those before it."""
        took = []
        for i in range(HOST_LEAD_IN + max(7, min(50, int(HOST_SECONDS / max(seconds, 1e-9))))):
            begin = time.perf_counter()
            output = call(*sets[i % len(sets)])
            took.append(time.perf_counter() - begin)
            del output  # the memory goes to the next call
        torch.cuda.synchronize()
        return 1e6 * statistics.median(took[HOST_LEAD_IN:])

    def batch(self, call, sets, calls, graphs=True):
        """A graph of the calls where they can be captured, a queue of eager calls elsewhere or without `graphs`."""
        if not graphs:
            return QueuedBatch(call, sets, calls, "eager calls asked for")
        try:
            return GraphBatch(call, sets, calls, self._pool, self._stream)
        except Exception as problem:
            torch.cuda.synchronize()
            why = f"no graph: {type(problem).__name__}: {str(problem)[:160]}"
            return QueuedBatch(call, sets, calls, why)

    def release(self):
        self._others = None
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


class GraphBatch:
    """Calls captured in a CUDA graph. A comparison's graphs share one memory pool: none needs another's outputs."""

    mode = "graph"
    note = ""

    def __init__(self, call, sets, calls, pool, stream):
        self._calls = calls
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)
        capture = torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local")
        # The outer context brings the stream back where the end of a capture raises. One call before it, on the same
        # stream: workspaces and counters that belong to a stream must not be born inside a graph.
        with torch.cuda.stream(stream):
            call(*sets[0])
            torch.cuda.synchronize()
            with capture:
                _rotate(call, sets, calls)
        nodes = timing_launches.work_nodes(self._graph.raw_cuda_graph())
        if nodes == 0:
            raise RuntimeError("the capture is empty: the candidate launches on a stream of its own")
        self.launches = None if nodes is None else nodes / calls
        self._graph.instantiate()
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self._seconds = self._replay(1, None) * calls * 1e-3

    def run(self, seconds: float, during) -> float:
        """Milliseconds per call over a turn of about `seconds`."""
        return self._replay(max(1, round(seconds / self._seconds)), during)

    def _replay(self, times: int, during) -> float:
        begin, end = self._events
        self._graph.replay()  # the lead-in: what was written before the turn leaves the cache, the host gets ahead
        begin.record()
        for _ in range(times):
            self._graph.replay()
        end.record()
        if during is not None:
            during()
        end.synchronize()
        return begin.elapsed_time(end) / (times * self._calls)


class QueuedBatch:
    """Eager calls, queued while a sleeping kernel holds the GPU, so that the host's time is not measured."""

    mode = "events"
    _CYCLES_PER_SECOND = 2.0e9  # the highest clock: the kernel sleeps at least as long as asked

    def __init__(self, call, sets, calls, note):
        self._call, self._sets, self._calls, self.note = call, sets, calls, note
        self.launches = timing_launches.profiled(call, sets[0])
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self._lead_in = sets[-max(1, calls // 4):]  # the last: none is in the cache when the first is timed
        begin = time.perf_counter()
        _rotate(call, self._lead_in, len(self._lead_in))
        _rotate(call, sets, calls)
        self._queue_seconds = time.perf_counter() - begin
        torch.cuda.synchronize()
        self._seconds = self._once(None) * calls * 1e-3

    def run(self, seconds: float, during) -> float:
        """Milliseconds per call over a turn of about `seconds`."""
        times = max(1, round(seconds / self._seconds))
        return statistics.fmean(self._once(during if i == times // 2 else None) for i in range(times))

    def _once(self, during) -> float:
        begin, end = self._events
        torch.cuda._sleep(int(1.5 * self._queue_seconds * self._CYCLES_PER_SECOND))
        _rotate(self._call, self._lead_in, len(self._lead_in))
        begin.record()
        _rotate(self._call, self._sets, self._calls)
        end.record()
        if during is not None:
            during()
        end.synchronize()
        return begin.elapsed_time(end) / self._calls


def _rotate(call, sets, calls: int) -> None:
    """Call over the sets in turn. As many outputs stay alive as there are sets: they rotate as inputs do."""
    outputs: list = [None] * len(sets)
    for i in range(calls):
        outputs[i % len(sets)] = call(*sets[i % len(sets)])
