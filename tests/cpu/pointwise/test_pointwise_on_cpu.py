"""The pointwise kernels' own code, run on a CPU thread by thread: every address, predicate and formula but no GPU."""
import math

import pytest
import torch

from tests.helpers.emulation import pointwise
from tkq.pointwise import gated_ops
from tkq.pointwise.plan import GatedConfig, RopeConfig
from tkq.pointwise.rope_check import Rotation
from tkq.pointwise.rope_launch import launch
from tkq.reference import pointwise as reference
from tkq.testing import assert_2x

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    torch.manual_seed(0)
    pointwise.use(monkeypatch)


def nans(*shape, dtype):
    return torch.full(shape, math.nan, dtype=dtype)


def within(shape, room, first, dtype):
    """A random tensor of this shape, as a view of rows `room` long from column `first` on, with NaN around it."""
    view = nans(*shape[:-1], room, dtype=dtype)[..., first:first + shape[-1]]
    return view.copy_(torch.randn(shape))


def check_gated(kind, gate, up, dy, packing, config=None):
    truth = reference.gated(kind, gate.double(), None if up is None else up.double(), packing)
    same = reference.gated(kind, gate, up, packing)
    out = nans(*truth.shape, dtype=gate.dtype)
    assert_2x(gated_ops._value(gate, up, kind, packing, out, config), truth, same, ulps=3, what="forward")
    out = nans(*gate.shape, dtype=gate.dtype), None if up is None else nans(*up.shape, dtype=gate.dtype)
    found = gated_ops._gradients_on_gpu(dy, gate, up, kind, packing, True, True, out, config)
    truths = reference.gated_backward(kind, dy.double(), gate.double(), None if up is None else up.double(), packing)
    same = reference.gated_backward(kind, dy, gate, up, packing)
    for name, mine, true, theirs in zip(("dgate", "dup"), found, truths, same):
        assert (mine is None) == (true is None)
        if mine is not None:
            assert_2x(mine, true, theirs, ulps=3, what=name)


@pytest.mark.parametrize("kind", ["swiglu", "geglu", "geglu_tanh"])
@pytest.mark.parametrize("dtype, shape", [("bf16", (2, 3, 104)), ("fp32", (5, 104))])
@pytest.mark.sampled(each_value=True)
def test_gated(kind, dtype, shape):
    check_gated(kind, *(torch.randn(shape).to(DTYPES[dtype]) for _ in range(3)), "apart")


@pytest.mark.parametrize("N, room, first", [(1, 1, 0), (7, 7, 0), (63, 63, 0), (64, 72, 8), (64, 66, 2), (60, 64, 0),
                                            (65, 70, 3)])
def test_gated_at_any_address(N, room, first):
    check_gated("swiglu", *(within((37, N), room, first, torch.bfloat16) for _ in range(3)), "apart")


def test_gated_of_three_dimensions():
    N, room, first = 60, 64, 0
    check_gated("swiglu", *(within((3, 8, N), room, first, torch.bfloat16) for _ in range(3)), "apart")
    check_gated("swiglu", *(torch.randn(3, 8, 63).bfloat16() for _ in range(3)), "apart")  # rows are joined
    swapped = [within((4, 5, N), room, first, torch.bfloat16).transpose(0, 1) for _ in range(3)]
    check_gated("swiglu", *swapped, "apart")


@pytest.mark.parametrize("packing", ["split", "interleaved"])
@pytest.mark.parametrize("N, room, first", [(33, 66, 0), (64, 136, 8), (64, 131, 1)])
@pytest.mark.sampled(when=lambda packing, N, first: N == 33 or packing == ("split" if first == 1 else "interleaved"))
def test_gated_in_one_tensor(packing, N, room, first):
    x, dy = within((19, 2 * N), room, first, torch.bfloat16), torch.randn(19, N).bfloat16()
    check_gated("swiglu", x, None, dy, packing)


@pytest.mark.parametrize("config", [GatedConfig(32, 1), GatedConfig(64, 8)])
def test_gated_with_other_configs(config):
    check_gated("swiglu", *(torch.randn(37, 72) for _ in range(3)), "apart", config)


def test_gated_in_several_launches(monkeypatch):
    monkeypatch.setattr(gated_ops, "MAX_UNITS", 50)
    check_gated("swiglu", *(torch.randn(5, 7, 24) for _ in range(3)), "apart")
    check_gated("swiglu", torch.randn(35, 48), None, torch.randn(35, 24), "split")


@pytest.mark.parametrize("needs", [(True, False), (False, True)])
def test_one_gradient(needs):
    dy, gate, up = (torch.randn(5, 40) for _ in range(3))
    found = gated_ops._gradients_on_gpu(dy, gate, up, "geglu", "apart", *needs)
    both = gated_ops._gradients_on_gpu(dy, gate, up, "geglu", "apart", True, True)
    for need, mine, wanted in zip(needs, found, both):
        assert torch.equal(mine, wanted) if need else mine is None


def check_rope(x, R, x2=None, table="fp32", config=None, **more):
    """Forward and back."""
    angles = torch.rand(64, R // 2) * 6
    cos, sin = (more.pop("tables", None) or (f(angles).to(DTYPES[table]) for f in (torch.cos, torch.sin)))
    for inverse in (False, True):
        rotation = Rotation(cos, sin, more.get("offset", 0), more.get("offsets"), more.get("position_ids"),
                    more.get("cu_seqlens"), more.get("interleaved", False), inverse)
        given = [x] if x2 is None else [x, x2]
        outs = [nans(*t.shape, dtype=t.dtype) for t in given]
        launch(rotation, *[t for pair in zip(given, outs) for t in pair], config=config)
        for t, y in zip(given, outs):
            truth = reference.rope(t.double(), cos.double(), sin.double(), inverse=inverse, **more)
            assert_2x(y, truth, reference.rope(t, cos, sin, inverse=inverse, **more), ulps=1)
            assert torch.equal(y[..., R:], t[..., R:])
    return outs


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype, table", [("bf16", "fp32"), ("fp32", "bf16")])
def test_rope(interleaved, dtype, table):
    for heads in (1, 5, 9) if dtype == "bf16" else (5,):
        check_rope(torch.randn(2, 7, heads, 32).to(DTYPES[dtype]), 32, table=table, interleaved=interleaved, offset=3)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("D, R", [(3, 2), (10, 6), (80, 32), (27, 16)])
def test_rope_of_any_number_of_columns(interleaved, D, R):
    check_rope(torch.randn(2, 5, 3, D).bfloat16(), R, interleaved=interleaved)


def test_rope_of_views():
    for room, first in ((48, 8), (34, 2), (33, 1)):
        check_rope(within((2, 7, 4, 32), room, first, torch.bfloat16)[:, 1:, 1:3], 32)
    check_rope(torch.randn(2, 3, 7, 32).bfloat16().transpose(1, 2), 32)
    check_rope(torch.randn(2, 7, 1, 32).bfloat16().expand(2, 7, 5, 32), 32)
    padded = [nans(64, 20, dtype=torch.float32)[:, 1:17].copy_(t) for t in torch.randn(2, 64, 16)]
    check_rope(torch.randn(2, 7, 3, 32).bfloat16(), 32, tables=padded)


def test_rope_with_positions():
    x = torch.randn(3, 7, 5, 32).bfloat16()
    for index in (torch.int32, torch.int64):
        check_rope(x, 32, offsets=torch.tensor([4, 0, 57], dtype=index))
        check_rope(x, 32, position_ids=torch.randint(-2, 67, (3, 7), dtype=index))
        check_rope(x, 32, position_ids=torch.randint(0, 64, (1, 7), dtype=index))
    check_rope(x, 32, position_ids=torch.full((3, 7), 1 << 32))
    check_rope(x, 32, tables=list(torch.randn(2, 3, 7, 16)))
    check_rope(x, 32, tables=list(torch.randn(2, 1, 7, 16)))


@pytest.mark.parametrize("lengths", [(9,), (3, 0, 4, 1), (0, 0, 7, 0), (1,) * 12])
@pytest.mark.parametrize("outside", [0, 2])
def test_rope_of_several_lengths(lengths, outside):
    ends = torch.tensor([0, *lengths]).cumsum(0).int() + outside
    total = sum(lengths) + 2 * outside
    x, x2 = torch.randn(total, 5, 40).bfloat16(), torch.randn(total, 2, 40).bfloat16()
    check_rope(x, 32, x2, cu_seqlens=ends)
    check_rope(x, 32, cu_seqlens=ends, offset=60)  # some beyond the table
    check_rope(x, 32, cu_seqlens=ends, offsets=torch.arange(len(lengths)))
    check_rope(x, 32, position_ids=torch.arange(total).flip(0))
    check_rope(x, 32, tables=list(torch.randn(2, 1, total, 16)))


@pytest.mark.parametrize("heads, more", [(8, 2), (3, 5), (1, 1), (5, 0)])
def test_rope_of_two_tensors(heads, more):
    for interleaved in (False, True):
        check_rope(torch.randn(2, 7, heads, 32).bfloat16(), 32, torch.randn(2, 7, more, 32).bfloat16(),
                   interleaved=interleaved)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_in_place(interleaved):
    cos, sin = torch.randn(2, 16, 12)
    qkv = torch.randn(2, 7, 6, 32).bfloat16()
    before, view = qkv.clone(), qkv[:, :, 1:4, :24]
    launch(Rotation(cos, sin, 0, None, None, None, interleaved, False), view, view)
    want = reference.rope(before[:, :, 1:4], cos, sin, interleaved=interleaved)
    assert_2x(view, want[..., :24].double(), want[..., :24], ulps=1)
    untouched = torch.ones(qkv.shape, dtype=torch.bool)
    untouched[:, :, 1:4, :24] = False
    assert torch.equal(qkv[untouched], before[untouched])


def test_rope_with_other_configs():
    for config in (RopeConfig(64, 2), RopeConfig(32, 8)):
        check_rope(torch.randn(2, 7, 11, 32).bfloat16(), 32, config=config)


def test_the_compiled_function_refuses_what_it_cannot_take():
    """And what it cannot see is refused before: by name, whichever call came before."""
    x, (cos, sin) = torch.randn(2, 5, 3, 32), torch.randn(2, 9, 16)
    starts = torch.tensor([0, 4, 10], dtype=torch.int32)
    calls = [(x, x, dict(), "x: dtype is"), (x, x.transpose(2, 3), dict(), "x: strides are"),
             (x, x, dict(cu_seqlens=starts), "cu_seqlens: goes with"), (x, x, dict(offset=0.5), "seqlen_offsets: got"),
             (x.flatten(0, 1), x.flatten(0, 1), dict(cu_seqlens=None), "cu_seqlens or position_ids")]
    good = Rotation(cos, sin, 0, None, None, None, False, False)
    launch(good, x, x.clone())
    launch(good._replace(cu_seqlens=starts), x.flatten(0, 1), x.flatten(0, 1).clone())
    for like, given, more, says in calls:
        given = given.double() if "dtype" in says else given
        with pytest.raises((TypeError, ValueError), match=says):
            launch(good._replace(**more), given, torch.empty_like(like))
    for bad, says in ((x[:, :2], "up: shape"), (x.half(), "up is torch.float16"), (x.transpose(2, 3), "up: s")):
        gated_ops._value(x[0], x[0], "swiglu", "apart")
        with pytest.raises((TypeError, ValueError), match=says):
            gated_ops._value(x[0], bad[0], "swiglu", "apart")
