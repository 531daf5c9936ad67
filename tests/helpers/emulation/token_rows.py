"""Mamba-2's gradients by rows of tokens on a CPU: their own code for all threads of a warpgroup at once, whose numbers
are arrays of 128, with these names in place of the DSL's and of tiles. Operands are rounded to bf16 as there; sums are
float64. Each role is a thread, of which one at a time goes on, in any order; semaphores know a phase by its parity
alone, and what is on its way is NaN. The exchange of two heads is left out."""
import functools
import itertools
import random
import threading
import time
import types
from types import SimpleNamespace

import numpy
import torch

from tests.helpers.emulation.fft_columns import COL, ROW, THREADS
from tests.helpers.emulation.wide_ring import Barrier
from tests.helpers.emulation.written import as_written
from tkq.linear_attention.engine import gates
from tkq.linear_attention.engine.ssd import Ssd
from tkq.linear_attention.launch import Made, spec_of
from tkq.linear_attention.token_rows import outputs, state
from tkq.linear_attention.token_rows.plan import FACTOR_STAGES, GROUPS, plan
from tkq.linear_attention.token_rows.sums import HeadPairs

CHUNK = 64


def bf16(x):
    return torch.tensor(numpy.asarray(x)).to(torch.bfloat16).double().numpy()


class Registers:
    """A number of each thread at each place."""

    def __init__(self, shape, held=None):
        self.held = numpy.full((*shape, len(THREADS)), numpy.nan) if held is None else held

    def __getitem__(self, at):
        return self.held[at]

    def __setitem__(self, at, value):
        self.held[at] = value


class Tile:
    """64 by cols: `tensor`, in the order of a thread's elements."""

    def __init__(self, cols, dtype=None):
        self.cols, self.dtype, self.tensor = cols, dtype, Registers((cols // 2,))

    @property
    def rows_view(self):
        return SimpleView(self.tensor)

    def places(self):
        for i in range(self.cols // 2):
            yield i, (ROW + 8 * (i // 2 % 2), COL + 8 * (i // 4) + i % 2)

    def matrix(self):
        found = numpy.empty((64, self.cols))
        for i, at in self.places():
            found[at] = self.tensor[i]
        return found

    def fill(self, matrix):
        for i, at in self.places():
            self.tensor[i] = (self.dtype or (lambda x: x))(matrix[at])


class SimpleView:
    def __init__(self, tensor):
        self.tensor = tensor

    def __getitem__(self, at):
        return self.tensor[4 * (at[1] // 2) + 2 * at[0] + at[1] % 2]


class RowVec:
    def __init__(self):
        self.tensor = Registers((2,))


class ColVec:
    def __init__(self, cols):
        self.cols, self.tensor = cols, Registers((cols // 4,))


class Sliced:
    """An array; None in an index is all of a mode."""

    def __init__(self, held):
        self.held = held

    def __getitem__(self, at):
        return self.held[tuple(slice(None) if i is None else i for i in at)]


class Tokens(numpy.ndarray):
    """A shared tile."""

    def panel(self, n):
        return self[:, 64 * n:64 * n + 64]


class Ring:
    def __init__(self, stages):
        self.count, self.stages = [0], stages

    stage = property(lambda self: int(self.count[0]) % self.stages)
    phase = property(lambda self: int(self.count[0]) // self.stages & 1)

    def advance(self):
        self.count[0] += 1


class Turns:
    """Threads of which one at a time goes on; where they meet another may."""

    def __init__(self, seed):
        self.lock, self.chance, self.end, self.found = threading.Lock(), random.Random(seed), time.monotonic() + 8, []

    def meet(self, ready=lambda: True):
        if self.chance.random() < 0.5:
            self._give()
        while not ready():
            assert time.monotonic() < self.end and not self.found, "waits for ever"
            self._give()

    def _give(self):
        self.lock.release()
        time.sleep(0)
        self.lock.acquire()

    def run(self, *roles):
        def begin(role):
            with self.lock:
                try:
                    role()
                except BaseException as problem:  # the test's thread is to have it
                    self.found.append(problem)

        threads = [threading.Thread(target=begin, args=(role,)) for role in roles]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.found:
            raise self.found[0]


class Pipe:
    """full, empty: arrivals. A warpgroup releases a stage by its four warps."""

    def __init__(self, turns, stages, full, empty):
        self.turns, self.stages = turns, stages
        self.full, self.empty = ([Barrier(n) for _ in range(stages)] for n in (full, empty))

    def ring(self):
        return Ring(self.stages)

    def acquire_empty(self, r):
        self.turns.meet(lambda: self.empty[r.stage].done & 1 != r.phase ^ 1)

    def commit(self, r):
        for _ in range(self.full[r.stage].arrivals):
            self.full[r.stage].arrive()
        self.turns.meet()

    def wait(self, r):
        self.turns.meet(lambda: self.full[r.stage].done & 1 != r.phase)

    def release(self, r):
        for _ in range(4):
            self.empty[r.stage].arrive()
        self.turns.meet()

    def fill(self, parts):
        """A role that brings parts(): (where, what) of each chunk."""
        ring = self.ring()
        for part in parts:
            self.acquire_empty(ring)
            for to, _ in part(ring.stage):
                to[...] = numpy.nan
            self.turns.meet()
            for to, value in part(ring.stage):
                to[...] = value
            self.commit(ring)
            ring.advance()


def element(x, i):
    if isinstance(x, (Tile, RowVec, ColVec)):
        return x.tensor[{Tile: i, RowVec: i // 2 % 2, ColVec: i // 4 * 2 + i % 2}[type(x)]]
    return 8 * (i // 4) + i % 2 if x == "column" else x


def apply_narrow(dst, f, *operands):
    several = dst if isinstance(dst, tuple) else (dst,)
    for i in range(several[0].cols // 2):
        found = f(*[element(x, i) for x in operands])
        for to, value in zip(several, found if isinstance(dst, tuple) else (found,)):
            to.tensor[i] = to.dtype(value)


def product(accumulate, transposed, d, a, b):
    a, b = (x.matrix() if isinstance(x, Tile) else x for x in (a, b))
    found = a @ (b.T if transposed else b)
    d.fill(found + d.matrix() if accumulate else found)


def columns(x, first, n):
    found = Tile(n, x.dtype)
    found.tensor = Registers((), x.tensor.held[first // 2:(first + n) // 2])
    return found


def load_rows(to, src, row0, limit):
    for r in range(2):
        to.tensor[r] = src[numpy.minimum(row0 + ROW + 8 * r, limit - 1)]


def load_shared_cols(to, src):
    for j in range(to.cols // 4):
        to.tensor[j] = src[COL + 8 * (j // 2) + j % 2]


def store_rows(dst, src, row0, limit):
    for r, n in itertools.product(range(2), THREADS[THREADS % 4 == 0]):
        row = row0 + ROW[n] + 8 * r
        if row < limit:
            dst[row] = src.tensor[r][n]


def quad_sum(x):
    for r in range(2):
        x.tensor[r] = x.tensor[r].reshape(-1, 4).sum(1).repeat(4)


def scaled_rows(d, a, v):
    for i in range(d.cols // 2):
        d.tensor[i] = a.tensor[i] * v.tensor[i // 2 % 2]


TK = SimpleNamespace(
    st=lambda *given: None, rt=Tile, rt_fl=Tile, rv=RowVec, cv=ColVec, columns=columns, apply_narrow=apply_narrow,
    COLUMN="column", warp_id=lambda: THREADS // 32, lane_id=lambda: THREADS % 32, load_rows=load_rows,
    load_shared_cols=load_shared_cols, store_rows=store_rows, quad_sum=quad_sum,
    mul_row=scaled_rows, first_row=lambda: ROW, first_col=lambda: COL,
    store=lambda to, x: to.__setitem__(..., x.matrix()), zero=lambda x: x.tensor.held.fill(0.0),
    copy=lambda d, a: d.fill(a.matrix()),
    mul=lambda d, a, x: d.fill(a.matrix() * x), load=lambda d, a: d.fill(a), load_T=lambda d, a: d.fill(a.T),
    load_from=lambda d, a, row, col: d.fill(a[:, col:col + d.cols]),
    store_elements=lambda d, a, row, col: d.__setitem__((slice(None), slice(col, col + a.cols)), a.matrix()),
    **{f"{name}_{kind}": (lambda accumulate, transposed: lambda d, a, b: product(accumulate, transposed, d, a, b))(
        name == "mma", kind == "ABt") for name in ("mm", "mma") for kind in ("AB", "ABt")},
    **{name: lambda *given, **more: None for name in ("mma_wait", "arrived", "publish", "store_wait")})
NAMES = dict(
    tk=TK, element=element, Float32=lambda x: numpy.asarray(x, dtype=numpy.float64), Uint32=int, const_expr=bool,
    cutlass=SimpleNamespace(range=lambda *given, unroll=1: range(*given), range_constexpr=range,
                            select_=numpy.where),
    cute=SimpleNamespace(size=lambda x: len(x.held), math=SimpleNamespace(exp2=lambda x, fastmath: numpy.exp2(x))))


def emulated(monkeypatch, part, cls, names):
    """An object's methods as they are written."""
    for name in names:
        setattr(part, name, types.MethodType(as_written(getattr(cls, name)), part))


def factors_of(given, scale, b, h, order):
    """As `Gate.sums` makes them, of all chunks in the order in which they are visited."""
    dt, A, bias = (x if x is None else x.double() for x in (given.steps.dt, given.steps.A, given.steps.bias))
    d = dt[b, :, h] + (0.0 if bias is None else bias[h])
    d = torch.nn.functional.softplus(d) if given.steps.softplus else d
    d = d.clamp(given.steps.low, given.steps.high)
    d = torch.nn.functional.pad(d, (0, -len(d) % CHUNK)).numpy().reshape(-1, CHUNK)[order].T
    G = numpy.cumsum(d * A[h].item() / numpy.log(2.0), 0)
    begun, left = numpy.exp2(G), numpy.exp2(G[-1] - G)
    begun, left = (left, begun) if given.reverse else (begun, left)
    return (G, scale * begun, left if given.reverse else left * d, numpy.exp2(G[-1:]),
            d if given.reverse else scale * d)


def roles(s, turns, tokens, factors):
    """Those that bring tokens, by name chunk by chunk, and factors, to a block's shared memory, which is made."""
    stages = s.stages
    for name, x in tokens.items():
        setattr(s, name, None if x is None else numpy.full((stages, *x.shape[1:]), numpy.nan).view(Tokens))
    held = [numpy.full((len(x), FACTOR_STAGES), numpy.nan) for x in factors]
    s.gate = gates.GateShared(*map(Sliced, held), None, None)
    s.tokens, s.factors, s.states = (Pipe(turns, *sizes) for sizes in (
        (stages, 1, 8), (FACTOR_STAGES, 1, 8), (GROUPS, 4, 4)))

    def of_tokens(i, stage):
        return [(getattr(s, name)[stage], x[i]) for name, x in tokens.items() if x is not None]

    def of_factors(i, stage):
        return [(to[:, stage], x[:, i]) for to, x in zip(held, factors)]

    count = range(factors[0].shape[1])
    return [functools.partial(pipe.fill, [functools.partial(of, i) for i in count])
            for pipe, of in ((s.tokens, of_tokens), (s.factors, of_factors))]


def launched(monkeypatch, given, scale):
    """As `launch.launch`, of one head a block; outputs of each head, in float64."""
    for module, (name, value) in itertools.product((gates, outputs, state), NAMES.items()):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, value)
    spec, (B, S, _, K), V = spec_of(given), given.q.shape, given.v.shape[3]
    ssd, heads, chunks = Ssd(spec), given.steps.dt.shape[2], -(-S // CHUNK)
    gate = gates.Gate(spec, ssd)
    gate.dtype = bf16
    pairs = HeadPairs(False, bf16)
    keeper = state.RowsState(spec, gate, pairs, plan(spec).states)
    maker = outputs.RowsOutputs(spec, ssd, gate, keeper, pairs)
    emulated(monkeypatch, keeper, state.RowsState, ["keep"])
    emulated(monkeypatch, maker, outputs.RowsOutputs,
             ["make", "products", "diagonal", "finish", "part", "begin"])
    keeper.view = lambda x, t: x[t.state, t.head] if keeper.by_keys else x[t.state, t.head].T
    o, dots = numpy.zeros((B, S, heads, V)), numpy.zeros((V // CHUNK, B, S, heads)) if spec.dot else None
    diagonal, of_skip = (numpy.zeros(n) for n in ((B, S, heads), (B, heads, V)))
    order = list(reversed(range(chunks))) if given.reverse else list(range(chunks))

    def rows(x, b, h):
        x = x.double().numpy()[b, :, h * x.shape[2] // heads]
        return numpy.pad(x, ((0, -S % CHUNK), (0, 0))).reshape(chunks, CHUNK, -1)[order]

    def states(x):
        return x if x is None else (x.mT if given.state_v_first else x).double().numpy()

    first = states(given.initial)
    last = None if given.final is None else numpy.zeros((B, heads, K, V))
    skip = given.steps.skip if given.steps.skip is None else given.steps.skip.double().numpy()
    for b, h in itertools.product(range(B), range(heads)):
        turns, s = Turns((b, h, S).__hash__()), SimpleNamespace(stages=plan(spec).stages, skip=None, pairs=None)
        s.state = numpy.full((keeper.places * keeper.parts, 64, keeper.cols), numpy.nan)
        bring = roles(s, turns, {name: None if x is None else rows(x, b, h) for name, x in (
            ("q", given.q), ("k", given.k), ("v", given.v), ("x", given.x))}, factors_of(given, scale, b, h, order))
        of_ssd = SimpleNamespace(skip=skip, diagonal=Sliced(diagonal))
        g = SimpleNamespace(initial=first, final=last, scale=scale, tokens=S, dots=Sliced(dots), o=None, ssd=of_ssd)
        t = SimpleNamespace(state=b, batch=b, head=h, chunks=chunks)

        def send(g, s, x, place, wg, b=b, h=h):
            at = CHUNK * place[2]
            o[b, at:at + CHUNK, h] = x.matrix()[:S - at]

        def put_skip(g, room, t, sums, wg, b=b, h=h):
            for j in range(0 if sums is None else V // 4):
                numpy.add.at(of_skip[b, h], COL + 8 * (j // 2) + j % 2, sums.tensor[j])

        maker.send, maker.put_skip = send, put_skip
        turns.run(*bring, functools.partial(keeper.keep, g, s, t, None), *(
            functools.partial(maker.make, g, s, t, wg, lambda t, i: order[i]) for wg in range(GROUPS)))
    last = last if last is None or not given.state_v_first else last.swapaxes(-1, -2)
    found = [x if x is None else torch.tensor(x) for x in (o, last, dots, of_skip, diagonal)]
    o, last, dots, of_skip, diagonal = found
    return Made(o, last, None if dots is None else dots.sum(0), of_skip=of_skip if spec.ssd.skip_gradient else None,
                diagonal=diagonal if spec.dot else None)
