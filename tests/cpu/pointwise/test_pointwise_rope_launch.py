"""What a call of rope launches: the compiled function is replaced by a note, so no GPU is needed."""
import pytest
import torch

import tkq
from tests.helpers.emulation import fake_gpu
from tkq.pointwise import rope_launch
from tkq.pointwise.rope_check import Rotation

X, COS, IDS = torch.zeros(2, 5, 3, 8), torch.zeros(9, 4), torch.zeros(2, 5).int()
FLAT, STARTS = X.flatten(0, 1), torch.tensor([0, 4, 10], dtype=torch.int32)


@pytest.fixture
def launches(monkeypatch):
    """[(spec, arguments)] of what the launch path would run, on CPU tensors."""
    seen = []
    monkeypatch.setattr(rope_launch.arch, "require_hopper", lambda device: None)
    monkeypatch.setattr(rope_launch, "_launchers", {})
    monkeypatch.setattr(rope_launch, "_launch_cache", {})
    monkeypatch.setattr(rope_launch.runtime, "function",
                        lambda recipe: lambda *args: seen.append((recipe.args[0], args)))
    return seen


def rotation(cos, sin, offset=0, offsets=None, ids=None, starts=None, interleaved=False, inverse=False):
    return Rotation(cos, sin, offset, offsets, ids, starts, interleaved, inverse)


def bf16(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16)


@pytest.mark.parametrize("x, R, table_dtype, interleaved, vector", [
    (bf16(2, 5, 3, 128), 128, torch.float32, False, 8), (bf16(2, 5, 3, 128), 128, torch.float32, True, 8),
    (bf16(2, 5, 3, 128).float(), 128, torch.bfloat16, False, 4), (bf16(2, 5, 3, 72), 64, torch.bfloat16, False, 8),
    (bf16(2, 5, 3, 68), 64, torch.bfloat16, False, 4), (bf16(2, 5, 3, 65), 64, torch.bfloat16, True, 1),
    (bf16(2, 5, 3, 20), 20, torch.float32, False, 2), (bf16(2, 5, 3, 20), 20, torch.float32, True, 4),
    (bf16(2, 5, 9, 128)[:, :, 3:5], 128, torch.float32, False, 8), (bf16(2, 3, 5, 64).transpose(1, 2), 64,
                                                                 torch.float32, False, 8),
    (bf16(2, 5, 3, 132)[..., 4:], 128, torch.float32, False, 4), (bf16(2, 5, 3, 129)[..., 1:], 128, torch.float32, True,
                                                                  1),
    (bf16(2, 5, 1, 64).expand(2, 5, 4, 64), 64, torch.float32, False, 8)])
def test_the_access_fits_every_address(launches, x, R, table_dtype, interleaved, vector):
    cos, sin = (torch.zeros(9, R // 2, dtype=table_dtype) for _ in range(2))
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for _ in range(2):
        rope_launch.launch(rotation(cos, sin, interleaved=interleaved), x, out)
    (spec, args), second = launches
    assert spec == second[0] and args[0] is x and args[1] is out and args[2] is args[3] is None
    assert (spec.vector, spec.rotary_dim, spec.rest, spec.interleaved) == (vector, R, x.shape[-1] - R, interleaved)
    assert args[8:] == (0, 1.0)


@pytest.mark.parametrize("first, pitch, interleaved, vector", [
    (0, 32, False, 8), (2, 32, False, 2), (1, 32, False, 1), (0, 33, False, 1), (0, 34, True, 4), (1, 40, True, 2)])
def test_tables_at_any_address(launches, first, pitch, interleaved, vector):
    cos = torch.zeros(9, 44)[:, :pitch].as_strided((9, 32), (pitch, 1), first)
    x = bf16(2, 5, 3, 64)
    rope_launch.launch(rotation(cos, cos, interleaved=interleaved), x, x)
    assert launches[0][0].vector == vector


@pytest.mark.parametrize("more, kind, index", [
    (dict(), "offset", None), (dict(offset=3), "offset", None), (dict(offsets=IDS[0, :2]), "offsets", "int32"),
    (dict(ids=IDS.long()), "ids", "int64"), (dict(ids=IDS[:1]), "ids", "int32")])
def test_how_tokens_find_their_row(launches, more, kind, index):
    rope_launch.launch(rotation(COS, COS, **more), X, X)
    (spec, args), = launches
    assert (spec.positions, spec.index, spec.varlen) == (kind, index, False)
    assert args[4] is COS and args[7] is None and args[8] == more.get("offset", 0)
    assert (args[6] is None) == (index is None) and (kind != "ids" or args[6].shape == (2, 5))


def test_a_row_for_each_token(launches):
    for rows, kind in ((2, "token"), (1, "offset")):
        t = torch.zeros(rows, 5, 4)
        rope_launch.launch(rotation(t, t), X, X)
        spec, args = launches.pop()
        assert spec.positions == kind and args[4].shape == (rows * 5, 4) and args[4].data_ptr() == t.data_ptr()
    t = torch.zeros(1, 10, 4)
    rope_launch.launch(rotation(t, t), FLAT, FLAT)
    assert launches[0][0].positions == "token" and launches[0][0].varlen


def test_several_lengths(launches):
    for more, kind in ((dict(starts=STARTS), "offset"), (dict(starts=STARTS, offsets=STARTS[:2]), "offsets"),
                       (dict(ids=IDS.flatten()), "ids")):
        rope_launch.launch(rotation(COS, COS, **more), FLAT, FLAT, FLAT[:, :1], FLAT[:, :1])
        spec, args = launches.pop()
        assert (spec.positions, spec.varlen, spec.tensors) == (kind, True, 2)
        assert args[7] is more.get("starts") and args[2].shape == (10, 1, 8)


def test_the_way_back_is_the_same_kernel(launches):
    for inverse, sign in ((False, 1.0), (True, -1.0)):
        rope_launch.launch(rotation(COS, COS, inverse=inverse), X, X)
        assert launches[-1][1][9] == sign
    assert launches[0][0] == launches[1][0] and len(rope_launch._launchers) == 1


def test_nothing_to_do_launches_nothing(launches):
    for shape in ((0, 5, 3, 8), (2, 0, 3, 8), (2, 5, 0, 8)):
        x = torch.zeros(shape)
        for _ in range(2):
            rope_launch.launch(rotation(COS, COS), x, x)
    assert launches == []


@pytest.mark.parametrize("x, more", [
    (X, dict(offset=5)), (X, dict(offset=-1)), (X, dict(ids=IDS, offset=1)), (X, dict(ids=IDS[:, :1])),
    (X, dict(offsets=IDS[0, :2], ids=IDS)), (FLAT, dict(starts=STARTS[:1])),
    (FLAT, dict(starts=STARTS, offsets=IDS[0]))])
def test_what_was_right_once_does_not_let_the_next_call_through(launches, x, more):
    """After a good call of the same kind: the compiled function would not see these."""
    rope_launch.launch(rotation(COS, COS), X, X)
    rope_launch.launch(rotation(COS, COS, offsets=IDS[0, :2]), X, X)
    rope_launch.launch(rotation(COS, COS, ids=IDS), X, X)
    for good in (dict(starts=STARTS), dict(starts=STARTS, offsets=IDS[0, :2])):
        rope_launch.launch(rotation(COS, COS, **good), FLAT, FLAT)
    before = len(launches)
    with pytest.raises(ValueError):
        rope_launch.launch(rotation(COS, COS, **more), x, x)
    assert len(launches) == before


def test_too_much_work_is_refused(launches, monkeypatch):
    monkeypatch.setattr(rope_launch, "MAX_UNITS", 20)
    rope_launch.launch(rotation(COS, COS), X, X)  # 2 * 5 tokens, one group of heads, one chunk of 2 x 4 columns
    assert len(launches) == 1 and launches[0][0].vector == 4
    with pytest.raises(NotImplementedError, match="units of work in one call, allowed are 20; split the batch"):
        rope_launch.launch(rotation(COS, COS), X.repeat(3, 1, 1, 1), X.repeat(3, 1, 1, 1))


@pytest.mark.parametrize("sparse", [torch.Tensor.to_sparse, lambda x: x[0, :, 0].to_sparse_csr()])
def test_a_sparse_tensor_is_refused_by_name(sparse):
    """On a GPU too, where results are allocated before anything else looks at the tensor."""
    x, cos = bf16(1, 5, 3, 8), torch.zeros(9, 4)
    with fake_gpu.launches() as launched:
        for call, name in ((lambda: tkq.rope(sparse(x), cos, cos), "rope: x"),
                           (lambda: tkq.rope_qk(sparse(x), x, cos, cos), "rope_qk: q"),
                           (lambda: tkq.rope_qk(x, sparse(x), cos, cos), "rope_qk: k")):
            with pytest.raises(TypeError, match=name):
                call()
    assert not launched
