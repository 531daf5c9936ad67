"""Scans of tensors whose tokens are contiguous: forward, and the gradients in one pass."""
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

import tkq.tile as tk
from tkq.recurrence.columns import Given, Operands, finite, put, steps
from tkq.recurrence.config import WARP
from tkq.recurrence.turns import Turn, Turns
from tkq.runtime.compile import fake
from tkq.tile import vectors
from tkq.tile.assembly import opaque_sum

STEPS = 32  # of a loop that is written out: the DSL warns of longer ones
PAD = 16  # bytes behind each line in shared memory: neighbouring lines' vectors lie in other banks


class Place(NamedTuple):
    """A warp's lines: their sequence, the first one's channel. channel: this lane's; is it one of them?"""

    batch: Any
    first: Any
    channel: Any
    inside: Any


class Held(NamedTuple):
    """The state, the initial one, the slots for it, and the warp's shared memory: (tokens, lines) of each tensor."""

    state: Any
    before: Any
    slots: Any
    parts: Any


class LineScan:
    """The scan of `ColumnScan`, of 32 channels a warp. A run is `rows` tokens of each: the warp loads them in vectors
    along time, neighbouring lanes neighbouring vectors, and turns them over in shared memory, where each lane finds a
    line of its own. Results go back the same way. Warps take the runs of a block in turn, as there; so the steps, and
    the bits, are the same.

    A backward needs a of the token before and h of the one behind, too: at a run's ends a lane loads these itself."""

    lanes = WARP

    def __init__(self, spec, config):
        self.spec, self.config, self.dtype = spec, config, tk.element_type(spec.dtype)
        self.turns = Turns(1 + spec.ends, config.warps)
        self.across = config.rows // spec.vector  # vectors of a line's run
        self.pitch = config.rows + PAD * 8 // self.dtype.width
        self.chunk = min(config.rows, 128 // self.dtype.width)  # tokens that a lane reads of its line at once
        self.tensors = (2 + spec.of_a) if spec.backward else 2

    def fake_arguments(self):
        """Compiled for any sizes, and any strides but that of tokens."""
        spec, v = self.spec, self.spec.vector
        B, T, C = fake.sym(), fake.sym(divisibility=v), fake.sym()

        def rows(wanted=True):
            strides = fake.sym64(divisibility=v), 1, fake.sym64(divisibility=v)
            return fake.tensor(spec.dtype, (B, T, C), strides, align=v * self.dtype.width // 8) if wanted else None

        def states(kind):
            return fake.tensor(kind, (B, C), align=tk.element_type(kind).width // 8) if kind else None

        operands = Operands(rows(), rows(spec.reads_h), rows(spec.of_a), rows(spec.of_b),
                            states(spec.state), states(spec.final and "fp32"), states(spec.of_state and "fp32"),
                            states(spec.ends and "fp32"))
        return rows(), operands, Int32(0)

    @cute.jit
    def __call__(self, a: cute.Tensor, operands: Operands, way: Int32, stream: cuda.CUstream):
        """way: not looked at: the spec says it."""
        B, _, C = a.shape
        self.kernel(Given(a, *operands, way)).launch(grid=[B * cute.ceil_div(C, WARP), 1, 1], stream=stream,
                                                     **self.config.launch)

    @cute.kernel
    def kernel(self, g: Given):
        warps, each = self.config.warps, self.pitch * WARP
        layout = cute.make_layout((self.config.rows, WARP, self.tensors, warps),
                                  stride=(1, self.pitch, each, each * self.tensors))
        parts, slots = tk.SharedAllocator().allocate_tensor(self.dtype, layout, 128), self.turns.slots()
        warp = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARP)
        self.thread(cute.arch.block_idx()[0], warp, tk.lane_id(), (slots, parts[None, None, None, warp]), g)

    @cute.jit
    def thread(self, block, warp, lane, shared, g: Given):
        """What one thread does. shared: the slots, and (tokens, lines) of each tensor."""
        (_, T, C), warps = g.a.shape, self.config.warps
        across = cute.ceil_div(C, self.lanes)
        batch, first = block // across, block % across * self.lanes
        of = Place(batch, first, cutlass.min(first + lane, C - 1), first + lane < C)
        state, before = (cute.make_rmem_tensor((n,), Float32) for n in (self.turns.vector, 1))
        state.fill(1.0)  # the product of the factors stands behind it
        before[0] = Float32(0.0 if g.state is None else g.state[batch, of.channel])
        if const_expr(self.spec.backward):
            state[0] = Float32(0.0 if g.final is None else g.final[batch, of.channel])
        else:
            state[0] = before[0]
        runs = cute.ceil_div(T, self.config.rows)
        held = Held(state, before, *shared)
        for k in cutlass.range(warp, runs, warps, unroll=1):
            if (k + 1) * self.config.rows <= T:
                self.run(held, Turn(k, runs, warp, lane), of, g)
            else:
                self.run(held, Turn(k, runs, warp, lane), of, g, True)
        if (runs - 1) % warps == warp and of.inside:
            if const_expr(not self.spec.backward and g.final is not None):
                g.final[batch, of.channel] = state[0]
            last = Float32(1.0)
            if const_expr(g.dstate is not None):
                last = self.token(g.a, of, T - 1)
                g.dstate[batch, of.channel] = last * state[0]
            if const_expr(g.product is not None):
                g.product[batch, of.channel] = finite(last * state[1])

    # ---- where things lie -------------------------------------------------------------------------------------------

    def memory(self, k, T):
        """The token that a run has first in memory; below 0 where a falling scan's last run is short."""
        return T - (k + 1) * self.config.rows if self.spec.falling else k * self.config.rows

    def line(self, x, of, channel):
        size = x.element_type.width // 8
        return x.iterator.toint() + (Int64(of.batch) * x.stride[0] + Int64(channel) * x.stride[2]) * size

    def at(self, x, address, t, n):
        pointer = cute.make_ptr(x.element_type, address + Int64(t) * (x.element_type.width // 8), x.memspace,
                                assumed_align=n * x.element_type.width // 8)
        return cute.make_tensor(pointer, cute.make_layout(n))

    def token(self, x, of, s):
        """This lane's number of the scan's token s, or of the nearest that there is."""
        T = x.shape[1]
        s = cutlass.max(cutlass.min(s, T - 1), 0)
        t = T - 1 - s if self.spec.falling else s
        return Float32(self.at(x, self.line(x, of, of.channel), t, 1)[0])

    def place(self, i, lane):
        """(line, its vector) of a warp's i-th access."""
        number = i * self.lanes + lane
        return number // self.across, number % self.across

    # ---- between memory and lines -----------------------------------------------------------------------------------

    def load(self, x, of, first, lane, rest):
        """A run of all lines, in vectors, in registers. What lies outside is the nearest inside."""
        T, V, found = x.shape[1], self.spec.vector, []
        for i, address in enumerate(self.addresses(x, of, lane)):
            t = first + self.place(i, lane)[1] * V
            t = cutlass.max(cutlass.min(t, T - V), 0) if rest else t
            found.append(vectors.load(self.at(x, address, t, V)))
        return found

    def addresses(self, x, of, lane):
        """Of the lines of a warp's accesses: of those that there are not the last one's. From one to the next by sums
        that the compiler does not see through: it would have all of them in registers throughout the loop."""
        C, line = x.shape[2], self.place(0, lane)[0]
        address, each = self.line(x, of, cutlass.min(of.first + line, C - 1)), self.lanes // self.across
        step = Int64(x.stride[2]) * (each * x.element_type.width // 8)
        for i in range(self.across):
            if i and each:  # otherwise all are of one line
                there = of.first + line + i * each < C
                address = opaque_sum(address, cutlass.select_(there, step, Int64(0)))
            yield address

    def from_shared(self, part, line, t, n):
        held = cute.make_rmem_tensor(n, self.dtype)
        cute.copy(self.atom(n), self.shared(part, line, t, n), held)
        return held

    def to_shared(self, held, part, line, t, n):
        cute.copy(self.atom(n), held, self.shared(part, line, t, n))

    def atom(self, n):
        return cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.dtype, num_bits_per_copy=n * self.dtype.width)

    def shared(self, part, line, t, n):
        """n tokens of a line in shared memory."""
        return cute.make_tensor((part.iterator + (line * self.pitch + t)).align(n * self.dtype.width // 8),
                                cute.make_layout(n))

    def put_down(self, loaded, part, lane):
        for i, x in enumerate(loaded):
            line, vector = self.place(i, lane)
            self.to_shared(x, part, line, vector * self.spec.vector, self.spec.vector)

    def own(self, part, lane):
        """This lane's line, as fp32."""
        found = []
        for c in range(0, self.config.rows, self.chunk):
            found += vectors.wide(self.from_shared(part, lane, c, self.chunk))
        return found

    def put_own(self, values, part, lane):
        for c in range(0, self.config.rows, self.chunk):
            self.to_shared(vectors.packed(values[c:c + self.chunk], self.dtype), part, lane, c, self.chunk)

    @cute.jit
    def store(self, x: cute.Tensor, part: cute.Tensor, of, at, rest: cutlass.Constexpr):
        first, lane = at
        T, C, V = x.shape[1], x.shape[2], self.spec.vector
        places = [self.place(i, lane) for i in range(self.across)]
        found = [self.from_shared(part, line, vector * V, V) for line, vector in places]
        address = self.addresses(x, of, lane)
        for i in cutlass.range_constexpr(self.across):
            line, vector = places[i]
            t, to = first + vector * V, next(address)
            there = of.first + line < C
            if const_expr(rest):
                there = there & (t >= 0) & (t < T)
            if there:
                vectors.store(found[i], self.at(x, to, t, V))

    # ---- the scan ---------------------------------------------------------------------------------------------------

    @cute.jit
    def run(self, held, turn, of, g: Given, rest: cutlass.Constexpr = False):
        """rest: some of the run's tokens may be behind the last one."""
        T, n, lane, state = g.a.shape[1], self.config.rows, turn.lane, held.state
        first, parts = self.memory(turn.k, T), [held.parts[None, None, i] for i in range(self.tensors)]
        read = [g.a, g.b] + [g.h] * (self.tensors - 2)
        loaded = [self.load(x, of, first, lane, rest) for x in read]
        edges = []
        if const_expr(self.spec.backward):
            edges = [self.token(g.a, of, turn.k * n - 1), self.token(read[-1], of, (turn.k + 1) * n)]
        for x, part in zip(loaded, parts, strict=True):
            self.put_down(x, part, lane)
        cute.arch.sync_warp()
        lines = [self.own(part, lane) for part in parts]
        if const_expr(self.spec.falling):
            lines = [x[::-1] for x in lines]
        self.turns.take(state, held.slots, turn)
        slope, found = [state[0]], []
        if const_expr(self.spec.backward):  # what comes into the first token is the final state's gradient itself
            lines[0] = [cutlass.select_(turn.k == 0, Float32(1.0), edges[0])] + lines[0][:-1]
        for first_step in cutlass.range_constexpr(0, n, STEPS):
            for j in cutlass.range_constexpr(first_step, min(first_step + STEPS, n)):
                there = turn.k * n + j < T if rest else None
                slope = steps(lines[0][j:j + 1], slope, lines[1][j:j + 1], there)
                found += slope
                if const_expr(self.spec.ends):
                    factor = lines[0][j] if there is None else cutlass.select_(there, lines[0][j], Float32(1.0))
                    state[1] = state[1] * factor
        put(state, slope)
        self.turns.hand_on(state, held.slots, turn)
        if const_expr(self.spec.backward):
            self.back(found, lines, edges, (turn, of, first), held, g, rest)
        else:
            if const_expr(g.h is not None):
                self.out(g.h, found, parts[1], of, (first, lane), rest)
        cute.arch.sync_warp()

    @cute.jit
    def back(self, found, lines, edges, place, held, g: Given, rest: cutlass.Constexpr):
        """db and da of a run."""
        (turn, of, first), n, T = place, self.config.rows, g.a.shape[1]
        if const_expr(self.spec.of_b):
            self.out(g.db, found, held.parts[None, None, 1], of, (first, turn.lane), rest)
        if const_expr(self.spec.of_a):
            earlier = lines[2][1:] + [edges[1]]
            products = []
            for first_step in cutlass.range_constexpr(0, n, STEPS):
                for j in cutlass.range_constexpr(first_step, min(first_step + STEPS, n)):
                    if const_expr(rest or j == n - 1):
                        last = turn.k * n + j >= T - 1
                        products.append(found[j] * cutlass.select_(last, held.before[0], earlier[j]))
                    else:
                        products.append(found[j] * earlier[j])
            self.out(g.da, products, held.parts[None, None, 2], of, (first, turn.lane), rest)

    @cute.jit
    def out(self, x: cute.Tensor, values, part: cute.Tensor, of, at, rest: cutlass.Constexpr):
        """A run's results, in the scan's order, by way of shared memory."""
        self.put_own(values[::-1] if self.spec.falling else values, part, at[1])
        cute.arch.sync_warp()
        self.store(x, part, of, at, rest)
