"""rope_cos_sin: what the tables hold, when one is cached, what is refused."""
import collections

import numpy
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import tkq
from tkq.pointwise import rope_tables

NAN = float("nan")


def angles_of(positions, dim, base=10000.0):
    frequencies = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    return positions.double()[:, None] * frequencies


def test_the_tables():
    cos, sin = tkq.rope_cos_sin(100, 16, 500000.0, device="cpu")
    angles = angles_of(torch.arange(100), 16, 500000.0)
    assert cos.shape == (100, 8) and cos.dtype == torch.float32
    assert torch.equal(cos, angles.cos().float()) and torch.equal(sin, angles.sin().float())
    half = tkq.rope_cos_sin(7, 16, dtype=torch.bfloat16, device="cpu")
    assert torch.equal(half[0], angles_of(torch.arange(7), 16).cos().bfloat16())
    scaled = tkq.rope_cos_sin(7, 16, inv_freq=torch.full((8,), 0.25))
    assert torch.equal(scaled[1], (torch.arange(7.0)[:, None] * 0.25).sin().expand(7, 8))
    assert tkq.rope_cos_sin(0, 16, device="cpu")[0].shape == (0, 8)


def test_tables_are_cached_and_not_for_ever(monkeypatch):
    monkeypatch.setattr(rope_tables, "_tables", type(rope_tables._tables)())
    computed, made = [], rope_tables._computed
    monkeypatch.setattr(rope_tables, "_computed", lambda rows, *given: computed.append(rows) or made(rows, *given))
    for seqlen, rows in ((100, [128]), (128, [128]), (7, [128]), (129, [128, 256]), (100, [128, 256])):
        cos, sin = tkq.rope_cos_sin(seqlen, 16, device="cpu")
        assert computed == rows and cos.shape == sin.shape == (seqlen, 8)
    assert len(rope_tables._tables) == 1
    for dim in range(2, 4 * rope_tables.CACHED, 2):
        tkq.rope_cos_sin(4, dim, device="cpu")
    assert len(rope_tables._tables) == rope_tables.CACHED


def test_what_is_written_to_a_table_changes_no_other():
    wanted = angles_of(torch.arange(32), 8).cos().float()
    of_before = tkq.rope_cos_sin(32, 8, device="cpu")
    for seqlen in (32, 7):
        for table in tkq.rope_cos_sin(seqlen, 8, device="cpu"):
            assert table.is_contiguous() and table.untyped_storage().nbytes() == table.nbytes
            table.mul_(2)
    assert torch.equal(of_before[0], wanted)
    for seqlen in (32, 7):
        assert torch.equal(tkq.rope_cos_sin(seqlen, 8, device="cpu")[0], wanted[:seqlen])


def test_tables_made_in_inference_mode_serve_training(monkeypatch):
    monkeypatch.setattr(rope_tables, "_tables", type(rope_tables._tables)())
    with torch.inference_mode():
        first = tkq.rope_cos_sin(16, 8, device="cpu")
    for found in (first, tkq.rope_cos_sin(16, 8, device="cpu")):
        x = torch.randn(1, 4, 2, 8, requires_grad=True)
        tkq.rope(x, *found).sum().backward()
        assert x.grad is not None


@pytest.mark.parametrize("mode", ["fake", "make_fx"])
def test_tables_made_under_a_mode_are_no_later_calls(monkeypatch, mode):
    monkeypatch.setattr(rope_tables, "_tables", type(rope_tables._tables)())

    def call(x):
        return tkq.rope(x, *tkq.rope_cos_sin(4, 8, device="cpu"))

    x = torch.randn(1, 4, 2, 8)
    angles = angles_of(torch.arange(4), 8)
    want = tkq.rope(x, angles.cos().float(), angles.sin().float())
    for _ in range(2):  # without a cached table, and with one
        if mode == "fake":
            with FakeTensorMode() as fake:
                assert call(fake.from_tensor(x)).shape == x.shape
                tkq.nn.RotaryEmbedding(8, 4, device="cpu")
        else:
            make_fx(call, tracing_mode="fake")(x)
        torch.testing.assert_close(call(x), want)
        assert type(tkq.nn.RotaryEmbedding(8, 4, device="cpu").cos) is torch.Tensor


def test_tables_in_a_compiled_function():
    def call(x):
        return tkq.rope(x, *tkq.rope_cos_sin(x.shape[1], 8, device="cpu"))

    x = torch.randn(1, 4, 2, 8)
    torch.testing.assert_close(torch.compile(call, backend="eager", fullgraph=True)(x), call(x))


@pytest.mark.parametrize("says, call", [
    ("seqlen: got -1", lambda: tkq.rope_cos_sin(-1, 8)), ("dim: got 7", lambda: tkq.rope_cos_sin(4, 7)),
    ("dim: got 0", lambda: tkq.rope_cos_sin(4, 0)),
    ("inv_freq: is on meta, .* for tables on cpu",
     lambda: tkq.rope_cos_sin(4, 8, inv_freq=torch.ones(4, device="meta"), device="cpu")),
    (r"inv_freq: shape is \(3,\), expected \(4\)", lambda: tkq.rope_cos_sin(4, 8, inv_freq=torch.ones(3))),
    ("base: got -1.0", lambda: tkq.rope_cos_sin(4, 8, -1.0)), ("base: got nan", lambda: tkq.rope_cos_sin(4, 8, NAN))])
def test_bad_tables_are_named(says, call):
    with pytest.raises(ValueError, match=says):
        call()


@pytest.mark.parametrize("says, given", [
    ("seqlen: got NoneType, expected an int", dict(seqlen=None)), ("seqlen: got float", dict(seqlen=4.0)),
    ("dim: got str", dict(dim="8")), ("base: got NoneType, expected a float", dict(base=None)),
    ("dtype: got torch.float64, allowed are torch.bfloat16, ", dict(dtype=torch.float64)),
    ("dtype: got None", dict(dtype=None)), ("inv_freq: got list, expected a torch.Tensor", dict(inv_freq=[1.0]))])
def test_tables_of_what_is_no_number_or_type(says, given, monkeypatch):
    with pytest.raises(TypeError, match=f"rope_cos_sin: {says}"):
        tkq.rope_cos_sin(**dict(dict(seqlen=4, dim=8, device="cpu"), **given))
    monkeypatch.setattr(rope_tables, "_tables", collections.OrderedDict())  # none is there already
    tkq.rope_cos_sin(numpy.int64(4), numpy.int32(8), numpy.float32(1e4), device="cpu")


@pytest.mark.parametrize("given, error, words", [
    ((16, -7), ValueError, "max_seqlen: got -7"), (("x", 7), TypeError, "dim: got str"),
    ((16, 7, -1.0), ValueError, "base: got -1.0"), ((15, 4), ValueError, "dim: got 15, allowed are even numbers"),
    ((8192, 2), NotImplementedError, "dim: got 8192, supported are up to 4096")])
def test_the_module_names_its_own_arguments(given, error, words):
    with pytest.raises(error, match=f"RotaryEmbedding: {words}"):
        tkq.nn.RotaryEmbedding(*given)
