"""The arithmetic of the pointwise kernels, on Python's integers: each element once, whole accesses, matching pairs."""
import collections

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.process import fresh
from tkq.pointwise import plan
from tkq.pointwise.spec import KINDS, PACKINGS, WIDTH, GatedSpec, RopeSpec, widest_gated

DTYPES = st.sampled_from(list(WIDTH))


def choose(condition, a, b):
    return a if condition else b


@st.composite
def rope_specs(draw):
    dtype, interleaved = draw(DTYPES), draw(st.booleans())
    vector = draw(st.sampled_from([v for v in (1, 2, 4, 8) if v * WIDTH[dtype] <= 128]))
    pairs = draw(st.integers(1, 12)) * (max(1, vector // 2) if interleaved else vector)
    rest = draw(st.integers(0, 12)) * vector
    return RopeSpec(dtype, draw(DTYPES), 2 * pairs, rest, interleaved, vector)


def accesses(spec, chunk):
    """[first column of each access of a chunk], and does it rotate?"""
    rotates, first, gap = plan.place_of(spec, chunk, choose)
    return [first, first + gap] if plan.columns(spec).two else [first], rotates


@given(rope_specs())
def test_every_column_of_a_head_belongs_to_one_chunk(spec):
    owners = collections.defaultdict(set)
    for chunk in range(plan.columns(spec).chunks):
        for first in accesses(spec, chunk)[0]:
            assert first % spec.vector == 0
            for column in range(first, first + spec.vector):
                owners[column].add(chunk)
    assert sorted(owners) == list(range(spec.rotary_dim + spec.rest))
    assert all(len(chunks) == 1 for chunks in owners.values())


@given(rope_specs())
def test_a_chunk_turns_whole_pairs_by_its_columns_of_the_table(spec):
    n, rotated = plan.table_vector(spec), set()
    for chunk in range(plan.columns(spec).chunks):
        firsts, rotates = accesses(spec, chunk)
        if not rotates:
            assert min(firsts) >= spec.rotary_dim
            continue
        if len(firsts) == 2:
            pairs = [(firsts[0] + e, firsts[1] + e) for e in range(spec.vector)]
        else:
            pairs = [(firsts[0] + e, firsts[0] + e + 1) for e in range(0, spec.vector, 2)]
        assert len(pairs) == n and (chunk * n) * WIDTH[spec.table] // 8 % plan.table_alignment(spec) == 0
        for e, pair in enumerate(pairs):
            i = chunk * n + e
            assert pair == ((2 * i, 2 * i + 1) if spec.interleaved else (i, i + spec.rotary_dim // 2))
            rotated.add(i)
    assert rotated == set(range(spec.rotary_dim // 2))


@given(rope_specs(), st.integers(1, 70), st.integers(1, 5), st.integers(0, 9))
@settings(max_examples=50)
def test_every_head_of_every_token_is_taken_once(spec, heads, tokens, more):
    config, chunks = plan.plan_rope(spec, max(heads, more)), plan.columns(spec).chunks
    groups, groups_2 = -(-heads // config.heads_each), -(-more // config.heads_each)
    seen = collections.Counter()
    for unit in range(tokens * (groups + groups_2) * chunks):
        token, group, chunk = plan.unit_of(unit, chunks, groups + groups_2)
        which, first, pitch, count = (
            (0, group, groups, heads) if group < groups else (1, group - groups, groups_2, more))
        for head in range(first, first + config.heads_each * pitch, pitch):
            if head < count:
                seen[token, which, head, chunk] += 1
    assert set(seen.values()) == {1}
    assert len(seen) == tokens * (heads + more) * chunks


@given(st.integers(1, 5000), st.sampled_from(plan.gated_variants(GatedSpec("swiglu", "bf16", "apart", 8))))
def test_every_vector_is_taken_once(total, config):
    blocks = -(-total // (config.threads * config.vectors))
    taken = sorted(plan.vector_of(config, b, t, j) for b in range(blocks) for t in range(config.threads)
                   for j in range(config.vectors))
    assert taken[:total] == list(range(total)) and len(set(taken)) == len(taken)
    assert taken[-1] < total + config.threads * config.vectors


def test_what_passes_the_end_stays_within_32_bits():
    worst = max(c.threads * c.vectors for c in plan.gated_variants(GatedSpec("swiglu", "bf16")))
    assert plan.MAX_UNITS + worst < 1 << 31


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("dtype", WIDTH)
def test_the_widest_access_is_16_bytes(packing, dtype):
    times = 2 if packing == "interleaved" else 1
    assert widest_gated(dtype, packing) * times * WIDTH[dtype] == 128


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("gradients, streams", [(None, 2), ("both", 3)])
def test_loads_in_flight(kind, packing, gradients, streams):
    """Three or four loads before the first is used, up to eight where gate and up interleave."""
    spec = GatedSpec(kind, "bf16", packing, widest_gated("bf16", packing), gradients)
    per_vector = streams - 1 if packing == "interleaved" else streams
    assert 3 <= plan.plan_gated(spec).vectors * per_vector <= (8 if packing == "interleaved" else 4)


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 8, 32])
def test_rope_takes_as_many_heads_as_there_are(heads):
    for spec in (RopeSpec("bf16", "fp32", 128, 0, False, 8), RopeSpec("bf16", "fp32", 128, 0, True, 8)):
        each = plan.plan_rope(spec, heads).heads_each
        assert each <= heads and each * (2 if plan.columns(spec).two else 1) <= 4
        assert each == 4 // (1 if spec.interleaved else 2) or 2 * each > heads
        assert all(c.heads_each <= heads for c in plan.rope_variants(spec, heads))


@pytest.mark.parametrize("heads", [1, 2, 3, 32])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", WIDTH)
def test_few_bytes_of_rope_are_on_their_way(dtype, interleaved, heads):
    """48 KB on an SM where a row of the table is known and a thread has its 4 loads; as much as fits elsewhere."""
    whole = 128 // WIDTH[dtype]
    spec = RopeSpec(dtype, "fp32", 128, 0, interleaved, whole)
    config = plan.plan_rope(spec, heads)
    loads = config.heads_each * (2 if plan.columns(spec).two else 1)
    assert (config.blocks > 0) == (loads == 4)
    if config.blocks:
        assert config.blocks * config.threads * loads * 16 == 48 << 10
    for other in (RopeSpec(dtype, "fp32", 128, 0, interleaved, whole // 2),
                  RopeSpec(dtype, "fp32", 128, 0, interleaved, whole, "ids", "int32"),
                  RopeSpec(dtype, "fp32", 128, 0, interleaved, whole, "offset", None, True)):
        assert plan.plan_rope(other, heads).blocks == 0


@given(st.integers(1, 32))
def test_shared_memory_keeps_further_blocks_off(blocks):
    block = plan.held_back(plan.RopeConfig(blocks=blocks)) + plan.SMEM_OF_THE_DRIVER
    assert blocks * block <= plan.SMEM_OF_AN_SM < (blocks + 1) * block or blocks == 1
    assert block <= (227 << 10) + plan.SMEM_OF_THE_DRIVER
    assert plan.held_back(plan.RopeConfig()) == 0


@pytest.mark.parametrize("error, says, spec", [
    (ValueError, "kind: got 'relu'", lambda: GatedSpec("relu", "bf16")),
    (TypeError, "dtype: got dtype fp64", lambda: GatedSpec("swiglu", "fp64")),
    (ValueError, "packing: got 'rows'", lambda: GatedSpec("swiglu", "bf16", "rows")),
    (ValueError, "vector: got 16", lambda: GatedSpec("swiglu", "bf16", "apart", 16)),
    (ValueError, "vector: got 8", lambda: GatedSpec("swiglu", "bf16", "interleaved", 8)),
    (ValueError, "vector: got 3", lambda: GatedSpec("swiglu", "bf16", "apart", 3)),
    (ValueError, "gradients: got 'gate'", lambda: GatedSpec("swiglu", "bf16", "split", 8, "gate")),
    (ValueError, "rank: got 4", lambda: GatedSpec("swiglu", "bf16", "split", 8, None, 4)),
    (TypeError, "cos: got dtype int32", lambda: RopeSpec("bf16", "int32", 64)),
    (NotImplementedError, "rotary_dim: got 63", lambda: RopeSpec("bf16", "bf16", 63)),
    (NotImplementedError, "rotary_dim: got 5000", lambda: RopeSpec("bf16", "bf16", 5000)),
    (ValueError, "rest: got -2", lambda: RopeSpec("bf16", "bf16", 64, -2)),
    (ValueError, "vector: got 8", lambda: RopeSpec("bf16", "bf16", 24, 0, False, 8)),
    (ValueError, "vector: got 8", lambda: RopeSpec("bf16", "bf16", 32, 4, False, 8)),
    (ValueError, "positions: got 'rows'", lambda: RopeSpec("bf16", "bf16", 64, positions="rows")),
    (ValueError, "index: got None", lambda: RopeSpec("bf16", "bf16", 64, positions="ids")),
    (ValueError, "tensors: got 3", lambda: RopeSpec("bf16", "bf16", 64, tensors=3))])
def test_specs_that_no_kernel_serves(error, says, spec):
    with pytest.raises(error, match=says):
        spec()


def test_calls_on_cpu_tensors_need_no_dsl():
    program = """
import sys, torch, tkq
x, (cos, sin) = torch.ones(1, 2, 1, 4), tkq.rope_cos_sin(2, 4, device="cpu")
tkq.rope_qk(tkq.rope(x, cos, sin), x, cos, sin), tkq.swiglu(x), tkq.geglu(x, x)
print("cutlass" in sys.modules)
"""
    done = fresh.run(program)
    assert done.stdout.split() == ["False"], done.stderr
