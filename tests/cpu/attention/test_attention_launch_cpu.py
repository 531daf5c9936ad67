"""The host path of a GPU call of flash_attn and flash_attn_varlen, with a launcher that only writes down."""
import functools
import math

import numpy
import pytest
import torch

import tkq
from tests.helpers.emulation import fake_gpu
from tkq.attention import ops, varlen_ops
from tkq.attention.arguments import Lengths, Options
from tkq.attention.backward import ops as backward_ops
from tkq.attention.backward import varlen_ops as backward_varlen_ops
from tkq.runtime.call.ops import LaunchCache

BF16, INT = torch.bfloat16, torch.int32
FLAGS = "causal", "deterministic", "return_lse"


@pytest.fixture
def launched(monkeypatch):
    """CPU tensors take the route of GPU tensors; a list of (spec, numbers) of what was launched."""
    calls = []

    def launcher_of(device, spec, length, config=None):
        return lambda operands, sequences, counter, numbers: calls.append((spec, numbers)), 132, 0.1

    for module in (ops, varlen_ops):
        monkeypatch.setattr(module, "launcher_of", launcher_of)
        monkeypatch.setattr(module, "_cpu", module.forward)
        monkeypatch.setattr(module, "_launchers", {})
        monkeypatch.setattr(module, "_launch_cache", LaunchCache())
    monkeypatch.setattr(ops.counters, "counter", lambda index: None)
    monkeypatch.setattr(ops.alloc, "empty", lambda index, shape, strides, dtype: torch.empty(shape, dtype=dtype))
    return calls


def dense(rows=64, **options):
    q = torch.zeros(1, rows, 2, 64, dtype=BF16)
    return tkq.flash_attn(q, q, q, **options)


def packed(max_q=64, max_k=64, change=lambda x: x, **options):
    q, cu = torch.zeros(64, 2, 64, dtype=BF16), torch.tensor([0, 64], dtype=INT)
    return tkq.flash_attn_varlen(change(q), q, q, cu, cu, max_q, max_k, **options)


@pytest.mark.parametrize("call", (dense, packed))
@pytest.mark.parametrize("left", (None, 5))
def test_a_right_of_0_is_causal(call, left, launched):
    for options in (dict(window_size=(left, 0)), dict(causal=True, window_size=(left, 0)),
                    dict(causal=True, window_size=(left, 7)), dict(causal=True, window_size=(left, None))):
        call(**options)
        call(**options)  # a call that is known
    assert len(launched) == 8
    for spec, numbers in launched:
        assert spec.causal and not spec.right and spec.left == (left is not None) and numbers[3] == -1
    call(window_size=(left, 7))
    assert launched[-1][0].right and not launched[-1][0].causal and launched[-1][1][3] == 7


def test_which_limits_a_kernel_knows(launched):
    """A limit beyond all keys is none, a left one of LONG_WINDOW keys or more is far. Calls that differ in one of these
    alone come one after the other: they must not share a launcher."""
    S, far = ops.SHORT, ops.LONG_WINDOW
    for found, rows, keys, left, right in (
            (("causal", "left", "long_window"), S, S, far, 0), (("causal", "left"), S, S, far - 1, 0),
            (("causal", "left", "long_window"), S, S, S - 2, 0), (("causal",), S, S, S - 1, 0),
            (("left", "long_window"), S, S, far, -1), (("left", "long_window", "right"), S, S, far, 63),
            (("left", "right"), S, S, far - 1, 63), (("left", "long_window"), S, S, far, S - 1),
            (("left", "long_window", "right"), S, S, far, S - 2), (("causal", "left", "long_window"), 1, S, far, 0),
            (("causal", "left", "long_window"), S + 1, S, far, 0), (("causal",), S, S, -1, 0), ((), S, S, -1, -1)):
        q, k = (torch.zeros(1, n, 2, 64, dtype=BF16) for n in (rows, keys))
        tkq.flash_attn(q, k, k, window_size=(left, right))
        spec, numbers = launched[-1]
        assert tuple(x for x in ("causal", "left", "long_window", "right") if getattr(spec, x)) == found
        assert numbers[2:4] == (left if spec.left else -1, right if spec.right else -1)


@pytest.mark.parametrize("call", (dense, packed))
@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("bad", (0, 1, None, "no", numpy.False_, numpy.True_, torch.tensor(True)), ids=str)
def test_flags_are_true_or_false(call, name, bad, launched):
    """Also after a call with the flag that equals what came: 0 == False."""
    for flag in (False, True):
        call(**{name: flag, "window_size": (5, 0)})
    with pytest.raises(TypeError, match=f"{name}: got .*, allowed are True and False"):
        call(**{name: bad, "window_size": (5, 0)})
    assert len(launched) == 2


@pytest.mark.parametrize("call", (dense, packed))
@pytest.mark.parametrize("name", FLAGS)
def test_flags_are_true_or_false_on_the_cpu_and_traced(call, name):
    with pytest.raises(TypeError, match=f"{name}: got 0, allowed are True and False"):
        call(**{name: 0})
    with pytest.raises(Exception, match=f"{name}: got 0, allowed are True and False"):
        torch.compile(lambda: call(**{name: 0}), fullgraph=True, backend="eager")()


@pytest.mark.parametrize("bad, error", ((-5, ValueError), (True, TypeError), (64.0, TypeError),
                                        (torch.tensor(64), TypeError), (numpy.True_, TypeError)), ids=str)
@pytest.mark.parametrize("name", ("max_q", "max_k"))
def test_longest_lengths_are_numbers(bad, error, name, launched):
    packed()
    packed(1, 1)
    for _ in range(2):
        with pytest.raises(error, match=f"max_seqlen_{name[-1]}: got"):
            packed(**{name: bad})
    assert len(launched) == 2 == len(varlen_ops._launch_cache) and len(varlen_ops._launchers) == 1


def test_what_is_not_in_use_is_filled_after_the_checks(launched, monkeypatch):
    filled = []
    monkeypatch.setattr(varlen_ops, "nothing_seen", lambda *a: filled.append(a))
    used = torch.tensor([5], dtype=INT)
    packed(seqused_q=used, return_lse=True)
    assert len(filled) == 1 == len(launched)
    with pytest.raises(ValueError, match="q: strides are"):
        packed(seqused_q=used, return_lse=True, change=lambda q: q.transpose(1, 2).contiguous().transpose(1, 2))
    with pytest.raises(TypeError, match="softcap: got str, expected a float"):
        packed(seqused_q=used, return_lse=True, softcap="1")
    assert len(filled) == 1 == len(launched)


class Copied(torch.Tensor):
    """Records its clones."""

    times = 0

    def clone(self, **options):
        Copied.times += 1
        return super().clone(**options)


@pytest.mark.parametrize("bad", (torch.Tensor.half, lambda k: torch.cat((k, k), -1)[..., ::2]), ids=("dtype", "stride"))
@pytest.mark.parametrize("ragged", (False, True))
def test_do_is_copied_after_the_checks(ragged, bad, monkeypatch):
    """A do that must be copied, beside a k that cannot be taken."""
    module = backward_varlen_ops if ragged else backward_ops
    monkeypatch.setattr(module, "run", lambda *a, **more: pytest.fail("launched"))
    monkeypatch.setattr(Copied, "times", 0)
    q = torch.zeros(*[1] * (not ragged), 64, 2, 64, dtype=BF16)
    do, lse = q.transpose(-1, -2).contiguous().transpose(-1, -2).as_subclass(Copied), torch.zeros(*q.shape[:-3], 2, 64)
    cu = torch.tensor([0, 64], dtype=INT)
    more = (Lengths(cu, cu, None, None, 64, 64),) if ragged else ()
    with pytest.raises((TypeError, ValueError), match="k"):
        module._cuda((do, q, bad(q), q, q, lse, None), None, *more, Options(), False, (True,) * 4)
    assert Copied.times == 0


def test_sequences_begin_with_0():
    q, cu = torch.zeros(64, 2, 64, dtype=BF16), torch.tensor([0, 64], dtype=INT)
    later = torch.tensor([10, 64], dtype=INT)
    for name, given in (("cu_seqlens_q", (later, cu)), ("cu_seqlens_k", (cu, later))):
        with pytest.raises(ValueError, match=f"{name} begins with 10, allowed is 0"):
            tkq.flash_attn_varlen(q, q, q, *given, 64, 64)
        lengths = Lengths(*given, None, None, 64, 64)
        with pytest.raises(ValueError, match=f"{name} begins with 10, allowed is 0"):
            backward_varlen_ops.attention_varlen_backward((q, q, q, q, q, torch.zeros(2, 64), None), None, lengths)


def test_lengths_in_use_are_another_call():
    x, cu, used = torch.zeros(256, 4, 64, dtype=BF16), torch.tensor([0, 256]).int(), torch.tensor([9]).int()
    with fake_gpu.launches() as seen, torch.no_grad():
        for more in ({}, {}, dict(seqused_k=used), dict(seqused_q=used)):
            tkq.flash_attn_varlen(x, x, x, cu, cu, 256, 256, **more)
    plain, again, keys, queries = [recipe for recipe, _ in seen]
    assert plain == again and keys != plain and queries not in (plain, keys)
    assert seen[2][1][1][3] is used and seen[3][1][1][2] is used


def test_a_right_limit_of_more_queries_than_keys():
    k = torch.zeros(1, 100, 4, 128, dtype=BF16)
    for rows, right, limited in ((300, 150, True), (300, 299, False), (300, 298, True), (50, 60, False)):
        q = torch.zeros(1, rows, 4, 128, dtype=BF16, requires_grad=True)
        with fake_gpu.launches() as seen:
            tkq.flash_attn(q, k, k, window_size=(None, right)).sum().backward()
        assert [recipe.args[0].right for recipe, _ in seen] == [limited] * 2, (rows, right)


def test_sinks_of_float32_stay_so_under_autocast():
    x, sinks = torch.zeros(1, 256, 4, 64), torch.zeros(4)
    with fake_gpu.launches() as seen, torch.no_grad(), torch.autocast("cpu", BF16):
        tkq.flash_attn(x, x, x, sinks=sinks)
        tkq.flash_attn(x, x, x, sinks=sinks.half())
    assert [(r.args[0].dtype, r.args[0].sinks) for r, _ in seen] == [("bf16", "fp32"), ("bf16", "bf16")]


def tokens(*shape, like=BF16):
    """Zeros that take no memory for heads."""
    return torch.zeros(*shape[:-2], 1, shape[-1], dtype=like).expand(shape)


def any_dense(rows=40, keys=512, dims=(64, 64), like=BF16, heads=(8, 2), **options):
    q, k, v = (tokens(1, n, h, d, like=like) for n, h, d in (
        (rows, heads[0], dims[0]), (keys, heads[1], dims[0]), (keys, heads[1], dims[1])))
    return functools.partial(tkq.flash_attn, q, k, v, **options)


def any_packed(rows=40, keys=512, dims=(64, 64), like=BF16, heads=(8, 2), sequences=1, longest=None, **options):
    q, k, v = (tokens(n, h, d, like=like) for n, h, d in (
        (rows, heads[0], dims[0]), (keys, heads[1], dims[0]), (keys, heads[1], dims[1])))
    cu = torch.zeros(sequences + 1, dtype=INT)
    return functools.partial(tkq.flash_attn_varlen, q, k, v, cu, cu, *longest or (rows, keys), **options)


CHANGED = [dict(rows=512), dict(keys=2048), dict(keys=8192), dict(dims=(64, 128)), dict(dims=(72, 64)),
           dict(dims=(512, 512)), dict(like=torch.float16), dict(heads=(8, 8)), dict(return_lse=True),
           dict(causal=True), dict(window_size=(5, None)), dict(window_size=(None, 5)), dict(softcap=3.0),
           dict(softmax_scale=0.5), dict(sinks=torch.zeros(8)), dict(sinks=torch.zeros(8, dtype=BF16))]


@pytest.mark.parametrize("call, more", (
    (any_dense, []), (any_packed, [dict(longest=(512, 512)), dict(longest=(40, 9000)), dict(sequences=0),
                                   dict(seqused_k=torch.zeros(1, dtype=INT)),
                                   dict(seqused_q=torch.zeros(1, dtype=INT))])), ids=("dense", "packed"))
@pytest.mark.parametrize("dims", ((64, 64), (128, 128)))
def test_calls_that_differ_in_one_thing_are_launched_apart(call, more, dims):
    with torch.no_grad():
        assert fake_gpu.apart(*(call(**dict(dims=dims) | changed) for changed in [{}, *CHANGED, *more]))


def gradient_of(call, **given):
    """A call and its backward; given: its sizes and options."""
    deterministic, used = given.pop("deterministic", False), given.pop("of_lse", False)
    made = call(**given, deterministic=deterministic, return_lse=True)
    leaves = [x.detach().requires_grad_() for x in made.args[:3]]

    def run():
        found = made.func(*leaves, *made.args[3:], **made.keywords)
        torch.autograd.grad(found if used else found[:1], leaves, [torch.zeros_like(x) for x in found[:1 + used]])

    return run


@pytest.mark.parametrize("call, more", (
    (any_dense, []), (any_packed, [dict(longest=(40, 2048)), dict(seqused_k=torch.zeros(1, dtype=INT)),
                                   dict(seqused_q=torch.zeros(1, dtype=INT))])), ids=("dense", "packed"))
@pytest.mark.parametrize("dims", ((64, 64), (320, 320)))
def test_gradients_of_calls_that_differ_in_one_thing_are_launched_apart(call, more, dims):
    changed = [dict(keys=2048), dict(keys=8192), dict(like=torch.float16), dict(heads=(8, 8)), dict(causal=True),
               dict(window_size=(5, None)), dict(window_size=(None, 5)), dict(softcap=3.0), dict(softmax_scale=0.5),
               dict(dims=(dims[0] + 8, dims[1] + 8)), dict(deterministic=True), dict(of_lse=True)]
    assert fake_gpu.apart(*(gradient_of(call, **dict(dims=dims) | one) for one in [{}, *changed, *more]))


@pytest.mark.parametrize("call", (any_dense, any_packed))
@pytest.mark.parametrize("dim", (72, 128, 328))
def test_the_scale_is_of_the_heads_own_columns(call, dim):
    """Not of those of the tile that holds them."""
    numbers = [args[-1] for _, args in fake_gpu.seen_by(gradient_of(call, dims=(dim, dim)))]
    assert len(numbers) == 2 and all(scale == dim**-0.5 for scale, *_ in numbers)


@pytest.mark.parametrize("options", ((False, 0.0, -1, -1, 0.0), (False, None, -1, -1, math.inf),
                                     (False, None, -2, -1, 0.0), (False, None, -1, 1 << 30, 0.0)))
@pytest.mark.parametrize("ragged", (False, True))
def test_numbers_that_were_traced_are_looked_at_before_a_launch(ragged, options):
    """The op's own arguments, which no public function has seen."""
    q, cu = torch.zeros(*[1] * (not ragged), 64, 2, 64, dtype=BF16), torch.tensor([0, 64], dtype=INT)
    lengths = (cu, cu, None, None, 64, 64) if ragged else ()
    with fake_gpu.launches() as seen, pytest.raises(ValueError, match="(softmax_scale|softcap|window_size): got"):
        (varlen_ops if ragged else ops)._op_cuda(q, q, q, None, *lengths, *options, True, False)
    assert not seen


def test_packed_heads_share_a_tile_where_the_longest_has_few_queries():
    for longest, pack in (((1, 512), 4), ((40, 9000), 4), ((512, 1), 1)):
        (recipe, _), = fake_gpu.seen_by(any_packed(longest=longest))
        assert recipe.args[0].pack == pack


def test_sinks_lie_side_by_side():
    with pytest.raises(ValueError, match="sinks: strides are"):
        dense(sinks=torch.zeros(4)[::2])


def test_queries_that_are_not_in_use_have_results_all_the_same():
    """Zeros, and the sink or -inf: no task has them."""
    torch.use_deterministic_algorithms(True)  # new memory is NaN then
    try:
        with fake_gpu.launches() as seen, torch.no_grad():
            o, lse = any_packed(seqused_q=torch.zeros(1, dtype=INT), return_lse=True)()
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(seen) == 1 and not o.any() and (lse == -math.inf).all()
