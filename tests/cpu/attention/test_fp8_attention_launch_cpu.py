"""The host path of float8 attention, with kernels that are notes: what they are given, memory between them, and what
calls share."""
import functools
import math

import pytest
import torch

import tkq
from tests.helpers.emulation import fake_gpu
from tests.helpers.emulation.contract import misfits
from tkq.attention.common.operands import Sequences
from tkq.attention.common.sequences import VarlenBatch
from tkq.attention.forward.spec import LONG_WINDOW

E4M3, INT = torch.float8_e4m3fn, torch.int32


@pytest.fixture(autouse=True)
def nothing_recorded():
    with torch.no_grad():
        yield


def zeros(*shape, dtype=E4M3):
    return torch.zeros(shape, dtype=torch.uint8).view(E4M3) if dtype == E4M3 else torch.zeros(shape, dtype=dtype)


def dense(rows=40, keys=512, dim=64, heads=(4, 2), turned=False, **options):
    q, k, v = zeros(2, rows, heads[0], dim), *(zeros(2, keys, heads[1], dim) for _ in range(2))
    v = zeros(2, heads[1], dim, keys).permute(0, 3, 1, 2) if turned else v
    return functools.partial(tkq.flash_attn_fp8, q, k, v, **options)


def packed(rows=40, keys=512, dim=64, heads=(4, 2), sequences=2, pages=0, longest=None, **options):
    q, cu = zeros(rows, heads[0], dim), torch.zeros(sequences + 1, dtype=INT)
    k, v = (zeros(*(8, pages) if pages else (keys,), heads[1], dim) for _ in range(2))
    given = dict(block_table=torch.zeros(sequences, 5, dtype=INT), seqused_k=torch.zeros(sequences, dtype=INT))
    options = (given if pages else {}) | options
    return functools.partial(tkq.flash_attn_fp8_varlen, q, k, v, cu, None if pages else cu, *longest or (rows, keys),
                             **options)


def scales(*names):
    return {f"{name}_descale": torch.ones(2, 2) for name in names}


KINDS = [dict(rows=300), dict(keys=600), dict(dim=96), dict(dim=128), dict(heads=(4, 4)), dict(causal=True),
         dict(softmax_scale=0.5), dict(accumulate="fast"), dict(out_dtype=torch.float16), dict(return_lse=True),
         dict(window_size=(5, None)), dict(window_size=(None, 5)), dict(window_size=(LONG_WINDOW, None), keys=600),
         scales("q"), scales("k"), scales("v"), scales("q", "k", "v")]
PACKED = [dict(sequences=1), dict(seqused_k=torch.zeros(2, dtype=INT)), dict(seqused_q=torch.zeros(2, dtype=INT)),
          dict(pages=16), dict(pages=100, return_lse=True)]


@pytest.mark.parametrize("call, more", ((dense, [dict(turned=True)]), (packed, PACKED)), ids=("dense", "packed"))
def test_kernels_are_given_what_they_take(call, more):
    for kind in [{}, *KINDS, *more]:
        with fake_gpu.launches() as seen:
            call(**kind)()
        assert len(seen) == 2 and misfits(seen) == []


@pytest.mark.parametrize("call, more", ((dense, [dict(turned=True)]), (packed, PACKED)), ids=("dense", "packed"))
def test_calls_that_differ_in_one_thing_are_launched_apart(call, more):
    assert fake_gpu.apart(*(call(**kind) for kind in [{}, *KINDS, *more]))


@pytest.mark.parametrize("keys", (1, 127, 128, 129, 300))
def test_there_is_memory_for_whole_tiles_of_values(keys):
    (_, (v, workspace)), _ = fake_gpu.seen_by(dense(keys=keys))
    assert workspace[1] == (2, 2, 64, (keys + 127) // 128 * 128) and v[1] == (2, keys, 2, 64)


@pytest.mark.parametrize("sequences, keys", ((1, 1), (1, 128), (5, 300), (3, 127)))
def test_there_is_memory_for_tiles_of_each_sequence(sequences, keys):
    cu = torch.zeros(sequences + 1, dtype=INT)
    for pages in (0, keys):
        _, (_, (_, (k, v, *_), *_)) = fake_gpu.seen_by(packed(keys=keys, sequences=sequences, pages=pages))
        rows = sequences * -(-5 * keys // 128) * 128 if pages else keys
        assert k[1] == (rows, 2, 64)
        assert v[1] == (2, 64, 128 * VarlenBatch(Sequences(cu, cu), rows, rows).slots(True, 128))


@pytest.mark.parametrize("call", (dense, packed, functools.partial(packed, longest=(1, 1))))
@pytest.mark.parametrize("limits, found", (((511, None), (-1, -1)), ((510, None), (510, -1)), ((None, 39), (-1, -1)),
                                           ((None, 38), (-1, 38)), ((5, 0), (5, -1))))
def test_limits_that_no_query_reaches_are_none(call, limits, found):
    """By the tensors' sizes: what a caller says is longest may be wrong."""
    recipe, (*_, numbers) = fake_gpu.seen_by(call(window_size=limits))[-1]
    assert numbers[2:4] == found and recipe.args[0].causal == (limits[1] == 0)
    assert (recipe.args[0].left, recipe.args[0].right) == (found[0] >= 0, found[1] >= 0)


@pytest.mark.parametrize("left, far", ((LONG_WINDOW - 1, False), (LONG_WINDOW, True)))
def test_which_limits_are_far(left, far):
    for call in (dense, packed):
        recipe, _ = fake_gpu.seen_by(call(keys=600, window_size=(left, None)))[-1]
        assert recipe.args[0].long_window == far


@pytest.mark.parametrize("call", (dense, packed))
@pytest.mark.parametrize("dim", (96, 128))
def test_the_scale_is_of_the_heads_own_columns(call, dim):
    _, (*_, numbers) = fake_gpu.seen_by(call(dim=dim))[-1]
    assert numbers[0] == dim**-0.5


def test_queries_that_are_not_in_use_have_results_all_the_same(monkeypatch):
    """Zeros and -inf, which no task writes: so such a call is not replayed without them."""
    from tkq.attention.fp8 import varlen_launch

    added = []
    monkeypatch.setattr(varlen_launch.calls, "add_launched", lambda *given: added.append(given))
    torch.use_deterministic_algorithms(True)  # new memory is NaN then
    try:
        with fake_gpu.launches():
            o, lse = packed(seqused_q=torch.zeros(2, dtype=INT), return_lse=True)()
            assert not added
            packed()()
    finally:
        torch.use_deterministic_algorithms(False)
    assert not o.any() and (lse == -math.inf).all() and len(added) == 1


@pytest.mark.parametrize("call", (dense, packed))
@pytest.mark.parametrize("name", "qkv")
def test_factors_are_of_all_sequences(call, name):
    """A kernel would read behind fewer."""
    with fake_gpu.launches() as seen, pytest.raises(ValueError, match=rf"{name}_descale: shape is \(1, 2\), expected"):
        call(**{f"{name}_descale": torch.ones(1, 2)})()
    assert not seen


@pytest.mark.parametrize("name", ("seqused_q", "seqused_k", "block_table"))
def test_lengths_lie_side_by_side(name):
    given = torch.zeros(2, 10, dtype=INT)[:, ::2] if name == "block_table" else torch.zeros(4, dtype=INT)[::2]
    with pytest.raises(ValueError, match=f"flash_attn_fp8_varlen: {name}: strides are"):
        packed(pages=16 if name == "block_table" else 0, **{name: given})()


@pytest.mark.parametrize("tokens", (1, 128, 300))
@pytest.mark.parametrize("options", (dict(), dict(rotate=True), dict(smooth_k=True), dict(angles=True)))
def test_quantize_qkv_gives_its_kernel_what_it_takes(tokens, options):
    """Sums of 128 tokens of k lie apart, and the mean in front of them."""
    q, k = zeros(2, tokens, 64, 4, dtype=torch.bfloat16).mT, zeros(2, tokens, 2, 64, dtype=torch.bfloat16)
    tables = dict(cos=torch.zeros(tokens, 32), sin=torch.zeros(tokens, 32)) if options.get("angles") else {}
    options = {name: flag for name, flag in options.items() if name != "angles"}
    with fake_gpu.launches() as seen:
        tkq.quantize_qkv(q, k, k, **tables, **options)
    assert len(seen) == 1 and misfits(seen) == []
    recipe, (_, operands) = seen[0]
    assert recipe.args[0].rope == bool(tables)
    sums, mean = operands[7:9]
    if options.get("smooth_k"):
        assert sums.shape == (-(-tokens // 128), 2, 2, 64) and mean.shape == sums.shape[1:]
        assert mean.data_ptr() + mean.nbytes == sums.data_ptr()
        assert mean.untyped_storage().nbytes() == mean.nbytes + sums.nbytes
    else:
        assert sums is mean is None


def test_angles_are_of_all_tokens():
    x, few, enough = zeros(1, 5, 2, 64, dtype=torch.bfloat16), torch.zeros(4, 32), torch.zeros(5, 32)
    for name in ("cos", "sin"):
        with pytest.raises(ValueError, match=f"quantize_qkv: {name} has 4 rows, 5 tokens need as many"):
            tkq.quantize_qkv(x, x, x, **(dict(cos=enough, sin=enough) | {name: few}))


def test_rows_that_int32_does_not_count():
    few = zeros(1, 1, 1, 64)
    for name in "qkv":
        given = dict.fromkeys("qkv", few) | {name: few.expand(1, 1 << 30, 1, 64)}
        given |= {} if name == "q" else dict(k=given[name], v=given[name])
        with fake_gpu.launches() as seen, pytest.raises(NotImplementedError, match="are fewer than 2.30 rows"):
            tkq.flash_attn_fp8(*given.values())
        assert not seen
