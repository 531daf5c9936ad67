"""Pools of states that are written in place, and indices that lie."""
import pytest
import torch

import tkq
from tests.gpu.linear_attention.test_linear_forward import BF16
from tests.gpu.linear_attention.test_packed import (
    EVERY,
    LENGTHS,
    OPS,
    S,
    call,
    cu_of,
    incoming_of,
    spoilt,
    tensors_of,
    with_gradients,
)
from tests.helpers.ops import bad_indices
from tests.helpers.sanitizer.guard_pages import guarded
from tests.helpers.sanitizer.nan_fill import poisoned

N = len(LENGTHS)
INDICES = 3, -1, 0, 7, -(1 << 31), (1 << 31) - 1, 5  # of a pool of 7


def indices_of(values=INDICES, dtype=torch.int32):
    return torch.tensor(values, device="cuda", dtype=dtype)


def first_of(pool, indices):
    """What sequences begin with."""
    zeros = torch.zeros_like(pool[0])
    return torch.stack([pool[i] if 0 <= i < len(pool) else zeros for i in indices.tolist()])


def after(pool, indices, states):
    pool = pool.clone()
    for i, state in zip(indices.tolist(), states):
        if 0 <= i < len(pool):
            pool[i] = state.to(pool.dtype)
    return pool


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.sampled(when=lambda op, dtype, packed: op == OPS[0] or (
    packed and dtype == torch.float32 and op != "linear_attn of columns"))
def test_states_are_read_and_written_there(op, dtype, packed):
    """Also where the call is a replay of one before: each goes on where the last one ended."""
    *tensors, pool = tensors_of(op)
    if not packed:
        tensors = [x.expand(N, *x.shape[1:]).contiguous() if x.dim() > 1 else x for x in tensors]
    pool, indices, cu = pool.to(dtype), indices_of(), cu_of() if packed else None
    pool[[1, 2, 4, 6]] = torch.nan  # rows of nobody
    for _ in range(4):
        before, version = pool.clone(), pool._version
        with poisoned():
            o, same = call(op, [*tensors, pool], cu, state_indices=indices)
            want, states = call(op, [*tensors, first_of(before, indices)], cu)
        assert same is pool and pool._version > version
        assert torch.equal(o, want)
        assert torch.equal(pool.nan_to_num(9.0), after(before, indices, states).nan_to_num(9.0))
    if op in OPS:
        alone = getattr(tkq, op)(*tensors, initial_state=pool.clone(), cu_seqlens=cu, state_indices=indices)
        assert torch.equal(alone, call(op, [*tensors, pool], cu, state_indices=indices)[0])


@pytest.mark.parametrize("op", OPS)
def test_a_pool_with_v_first(op):
    *tensors, pool = tensors_of(op, V=128)
    turned, indices = pool.mT.contiguous(), indices_of()
    o, _ = call(op, [*tensors, pool], cu_of(), state_indices=indices)
    again, same = call(op, [*tensors, turned], cu_of(), state_indices=indices, state_v_first=True)
    assert same is turned and torch.equal(again, o) and torch.equal(turned.mT, pool)


@pytest.mark.parametrize("op", OPS)
def test_a_pool_in_a_cuda_graph(op):
    *tensors, pool = tensors_of(op)
    indices, cu = indices_of(), cu_of()
    call(op, [*tensors, pool.clone()], cu, state_indices=indices)
    graph, mine = torch.cuda.CUDAGraph(), pool.clone()
    with torch.cuda.graph(graph):
        o, _ = call(op, [*tensors, mine], cu, state_indices=indices)
    for values in (INDICES, (1, 2, 3, 4, 5, 6, 0), (-1,) * 7):
        indices.copy_(indices_of(values))
        want, _ = call(op, [*tensors, pool], cu, state_indices=indices)
        graph.replay()
        assert torch.equal(o, want) and torch.equal(mine, pool)


@pytest.mark.parametrize("op", OPS)
def test_a_pool_in_a_compiled_program(op):
    *tensors, pool = tensors_of(op)
    theirs, indices, cu = pool.clone(), indices_of(), cu_of()
    ours = lambda pool: call(op, [*tensors, pool], cu, state_indices=indices)[0]
    compiled = torch.compile(ours, fullgraph=True)
    for _ in range(2):
        assert torch.equal(compiled(pool), ours(theirs)) and torch.equal(pool, theirs)


@pytest.mark.parametrize("op", [OPS[0], pytest.param(OPS[1], marks=pytest.mark.slow)])
def test_a_pool_of_more_than_32_bits_of_elements(op):
    """Its first and last rows, and none between."""
    *tensors, states = tensors_of(op, K=128, V=128)
    rows = (1 << 31) // (4 * 128 * 128) + 5
    pool = torch.zeros(rows, 4, 128, 128, device="cuda", dtype=BF16)
    indices = indices_of((0, rows - 1, 1, rows - 2, -1, rows, rows - 3))
    for i, state in zip(indices.tolist(), states):
        if 0 <= i < rows:
            pool[i] = state
    first = first_of(pool, indices)
    o, _ = call(op, [*tensors, pool], cu_of(), state_indices=indices)
    want, last = call(op, [*tensors, first], cu_of())
    assert torch.equal(o, want)
    for i, state in zip(indices.tolist(), last):
        if 0 <= i < rows:
            assert torch.equal(pool[i], state.to(BF16))
    assert not pool[2:rows - 3].any()
    del pool
    torch.cuda.empty_cache()  # for tests that need the GPU's memory


# ---- indices that lie -------------------------------------------------------------------------------------------

ENDS = pytest.mark.parametrize("where", ["front", "end"])


def guarded_call(op, where):
    """Tensors of 300 tokens with nothing mapped before or behind them."""
    given = tensors_of(op, S=300, N=7)
    return [guarded(x, where) for x in given[:-1]], given[-1]


@ENDS
@EVERY
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.sampled(when=lambda op, where, dtype: op in OPS[:1 if dtype == torch.int64 else 2] or (
    where == "end" and dtype == torch.int32))
def test_cu_seqlens(op, where, dtype):
    """As those that they mean, bit by bit, with gradients; more sequences than a warp looks at together."""
    tensors, states = guarded_call(op, where)
    do = guarded(incoming_of([*tensors, states])[0], where)
    for i, cuts in enumerate(bad_indices.CUTS):
        numbers = [*cuts, *[n // 3 for n in cuts] * 9] if i % 2 else [*cuts]
        if dtype == torch.int64:
            numbers = [n << 20 if abs(n) > 300 else n for n in numbers]
        N = len(numbers) - 1
        bad = guarded(torch.tensor(numbers, device="cuda", dtype=dtype), where)
        right = torch.tensor(numbers, device="cuda").clamp(0, 300).cummax(0).values.to(dtype)
        initial = guarded(states[:1].repeat(N, 1, 1, 1), where)
        incoming = do, torch.randn_like(initial)
        with poisoned():
            found, want = (with_gradients(op, [*tensors, initial], cu, incoming) for cu in (bad, right))
        assert all(map(torch.equal, found, want)), cuts
        first, last = int(right[0]), int(right[-1])
        clean = [spoilt(x, slice(0, first), slice(last, None)) for x in tensors]
        with poisoned():
            again = with_gradients(op, [*clean, initial], bad, incoming)
        assert all(map(torch.equal, again, found)), cuts


@ENDS
@EVERY
@pytest.mark.sampled(when=lambda op, where: op in OPS or (where == "end" and op != "linear_attn of columns"))
def test_state_indices(op, where):
    """Of 64 bits, too: of gates of columns by --slow alone, as these take another kernel."""
    tensors, states = guarded_call(op, where)
    cu = torch.tensor((0, 5, 5, 70, 200, 200, 280, 300), device="cuda", dtype=torch.int32)
    wide = (1 << 32, (1 << 32) + 3, (1 << 63) - 1, -(1 << 63), -(1 << 32) + 2, 1 << 31, 4)
    for values in (INDICES, (6, 5, 4, 3, 2, 1, 0), (-1,) * 7, (1 << 30,) * 7, (-7, 700, 6, 1 << 20, -1 << 20, 7, 0),
                   *[wide] * ("columns" not in op or where == "front")):
        indices = guarded(indices_of(values, torch.int64 if values is wide else torch.int32), where)
        pool = guarded(states, where)
        want, last = call(op, [*tensors, first_of(states, indices)], cu)
        o, _ = call(op, [*tensors, pool], cu, state_indices=indices)
        assert torch.equal(o, want) and torch.equal(pool, after(states, indices, last))


@pytest.mark.parametrize("op", OPS)
def test_one_row_for_all(op):
    """It has numbers of theirs; the others are as they were."""
    *tensors, pool = tensors_of(op)
    before = pool.clone()
    call(op, [*tensors, pool], cu_of(), state_indices=indices_of((2,) * N))
    assert torch.equal(pool[[0, 1, 3, 4, 5, 6]], before[[0, 1, 3, 4, 5, 6]]) and pool.isfinite().all()


@pytest.mark.parametrize("op", OPS)
def test_an_empty_pool(op):
    *tensors, pool = tensors_of(op)
    o, same = call(op, [*tensors, pool[:0]], cu_of(), state_indices=indices_of())
    assert same.shape[0] == 0 and torch.equal(o, call(op, [*tensors, torch.zeros_like(pool)], cu_of())[0])
    assert o.shape == (1, S, 4, 64)
