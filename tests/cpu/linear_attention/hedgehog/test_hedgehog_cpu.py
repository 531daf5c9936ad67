"""tkq.hedgehog on the CPU: results, gradients, what is refused, its kernels."""
import math

import pytest
import torch

import tkq
from tests.helpers import hedgehog_launches
from tests.helpers.emulation import fake_gpu
from tests.helpers.linear_launches import launched
from tkq.linear_attention.finish import catalog as finish
from tkq.linear_attention.hedgehog import gradients
from tkq.linear_attention.hedgehog.catalog import expectation, of_keys, of_queries, of_window, shipped
from tkq.linear_attention.hedgehog.launch import keys_recipe, queries_recipe, recipe, window_recipe
from tkq.linear_attention.hedgehog.plan import segments
from tkq.linear_attention.hedgehog.spec import GradientSpec, HedgehogSpec, WindowSpec
from tkq.linear_attention.launch import recipe as linear_recipe
from tkq.linear_attention.plan import plan
from tkq.linear_attention.spec import LinearSpec
from tkq.reference import hedgehog as reference
from tkq.runtime.compile.expectation import Expectation
from tkq.testing import sass

BF16, F32 = torch.bfloat16, torch.float32
NAMES = "q", "k", "v", "q_map", "k_map", "linear_factor", "window_factor"


def make(S=200, D=64, F=32, B=2, H=3, dtype=BF16, sharp=1.0):
    """By name."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, S, H, D).to(dtype) for _ in range(3))
    q_map, k_map = (sharp * torch.randn(H, D, F).mul(D**-0.5) for _ in range(2))
    return dict(q=q, k=k, v=v, q_map=q_map.to(dtype), k_map=k_map.to(dtype), linear_factor=torch.rand(H),
                window_factor=torch.rand(H))


def exactly(q, k, v, q_map, k_map, linear_factor, window_factor):
    """Token by token, in float64, in words of its own: for each query the list of its keys."""
    def features(x, w):
        y = x @ w
        return torch.cat((torch.softmax(y, -1), torch.softmax(-y, -1)), -1).clamp(min=1e-6)

    out = torch.zeros_like(v)
    for b, h in ((b, h) for b in range(v.shape[0]) for h in range(v.shape[2])):
        f, g = features(q[b, :, h], q_map[h]), features(k[b, :, h], k_map[h])
        for t in range(v.shape[1]):
            first = max(0, (t // 64 - 1) * 64)
            s = (k[b, first:t + 1, h] @ q[b, t, h]) / math.sqrt(q.shape[3])
            near = window_factor[h] * torch.exp(s - s.max())
            far = linear_factor[h] * (g[:first] @ f[t])
            top = near @ v[b, first:t + 1, h] + far @ v[b, :first, h]
            out[b, t, h] = top / (near.sum() + far.sum() + 1e-6)
    return out


@pytest.mark.parametrize("linear", [1e-20, 1e-9])
def test_a_linear_factor_next_to_nothing(linear):
    """Its gradient has what is before the window by sums that the denominator does not know."""
    given = [x.float() for x in make(B=1).values()]
    given[5] = torch.full_like(given[5], linear)
    leaves = [x.double().requires_grad_() for x in given]
    do, (o, inverse) = torch.randn_like(given[2]), reference.outputs(*given)
    want, = torch.autograd.grad(reference.hedgehog(*leaves), leaves[5], do.double())
    found = reference.hedgehog_backward(do, o.to(BF16), inverse, *given).linear_factor
    assert (found - want).norm() < 2**-5 * want.norm()


@pytest.mark.parametrize("S", [1, 64, 65, 129, 260])
def test_results(S):
    given = make(S, B=1, H=2)
    o = tkq.hedgehog(**given)
    assert (o.dtype, o.shape) == (BF16, given["v"].shape) and o.is_contiguous()
    want = exactly(*(x.double() for x in given.values()))
    torch.testing.assert_close(reference.hedgehog(*(x.double() for x in given.values())), want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(o.double(), want, rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize("S, sharp", [(1, 1.0), (65, 1.0), (150, 1.0), (300, 8.0)])
def test_gradients_in_float64(S, sharp):
    """Beside autograd of all pairs; also where features are at their least."""
    leaves = [x.double().requires_grad_() for x in make(S, 16, 8, sharp=sharp).values()]
    o = reference.hedgehog(*leaves)
    do = torch.randn_like(o)
    want = torch.autograd.grad(o, leaves, do, materialize_grads=True, allow_unused=True)
    with torch.no_grad():
        found = reference.hedgehog_backward(do, *reference.outputs(*leaves), *leaves)
    for name, mine, exact in zip(NAMES, found, want):
        torch.testing.assert_close(mine, exact, rtol=1e-10, atol=1e-10, msg=name)
    least = (reference.features(leaves[1], leaves[4]) == reference.LEAST).any()
    assert least == (sharp > 1)


def test_gradients():
    leaves = [x.requires_grad_() for x in make().values()]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    o, exact = tkq.hedgehog(*leaves), reference.hedgehog(*wide)
    do = torch.randn_like(o)
    want = torch.autograd.grad(exact, wide, do.double())
    for name, x, mine, one in zip(NAMES, leaves, torch.autograd.grad(o, leaves, do), want):
        assert (mine.dtype, mine.shape) == (x.dtype, x.shape)
        torch.testing.assert_close(mine.double(), one, rtol=2**-7, atol=1e-3, msg=name)


def in_plain_pytorch(monkeypatch):
    """The launches as the kernels have them, of which float64 is not rounded."""
    monkeypatch.setattr(gradients, "launch", launched)
    for name, emulated in hedgehog_launches.ALL.items():
        monkeypatch.setattr(gradients, name, emulated)


def saved(given):
    """Without features, which are then made anew."""
    q, k, *_ = given
    return gradients.Saved(*reference.outputs(*given), reference.largest_scores(q, k), q.new_empty(0), k.new_empty(0),
                           *given)


def backward(do, given):
    return gradients.backward(do, saved(given))


@pytest.mark.parametrize("S, F", [(40, 64), (128, 64), (333, 64), (333, 32)])
def test_gradients_by_launches(S, F, monkeypatch):
    """By the features' own kernels and, of maps of 32 columns, by three launches of the engine."""
    in_plain_pytorch(monkeypatch)
    given = [x.double() for x in make(S, F=F).values()]
    do = torch.randn_like(given[0])
    want = reference.hedgehog_backward(do, *reference.outputs(*given), *given)
    for name, mine, exact in zip(NAMES, backward(do, given), want):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-6, atol=1e-6, msg=name)  # float32's sums


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (4,), (5, 6), (0, 1, 2)])
def test_gradients_of_some_alone(wanted, monkeypatch):
    """Are those of all: none is made of what only others would have needed."""
    needs = tuple(i in wanted for i in range(7))
    in_plain_pytorch(monkeypatch)
    given = [x.double() for x in make(200, F=64).values()]
    do = torch.randn_like(given[0])
    want = reference.hedgehog_backward(do, *reference.outputs(*given), *given)
    found = gradients.backward(do, saved(given), needs)
    for i in wanted:
        torch.testing.assert_close(found[i].double(), want[i], rtol=1e-6, atol=1e-6, msg=NAMES[i])


@pytest.mark.parametrize("F", [64, 32])
def test_small_weights_of_fp16_have_room(F, monkeypatch):
    in_plain_pytorch(monkeypatch)
    given = list(make(400, F=F, dtype=torch.float16).values())
    given[5], given[6] = given[5] * 1e-5, given[6] * 1e-2
    wide = [x.double() for x in given]
    do = torch.randn_like(given[0])
    want = reference.hedgehog_backward(do.double(), *reference.outputs(*wide), *wide)
    for name, mine, exact in zip(NAMES, backward(do, given), want):
        assert (mine - exact).norm() <= 2**-8 * exact.norm(), name


@pytest.mark.parametrize("wanted", [("q",), ("v",), ("linear_factor",), ("k_map", "window_factor")])
def test_gradients_that_are_asked_for(wanted):
    given = make(70, F=64)
    leaves = [x.requires_grad_(name in wanted) for name, x in given.items()]
    everything = [x.detach().requires_grad_() for x in leaves]
    do = torch.randn_like(given["q"])
    found = dict(zip(NAMES, torch.autograd.grad(tkq.hedgehog(*everything), everything, do)))
    tkq.hedgehog(*leaves).backward(do)
    for name, x in given.items():
        assert (x.grad is None) == (name not in wanted)
        assert x.grad is None or torch.equal(x.grad, found[name])


@pytest.mark.parametrize("wanted, count", [("q", 2), ("dlinear", 2), ("v", 3), ("window", 2)])
def test_launches_of_what_is_asked_for(wanted, count):
    """The forward, queries, which keys take some numbers of, keys and values."""
    index = dict(q=0, dlinear=5, v=2, window=6)[wanted]
    leaves = [x.requires_grad_(i == index) for i, x in enumerate(make(300, F=64, B=1).values())]
    with fake_gpu.launches() as seen:
        o = tkq.hedgehog(*leaves)
        torch.autograd.grad(o, leaves[index], torch.zeros_like(o))
    assert len(seen) == count


def test_a_window_alone_is_attention():
    given = make(128) | dict(linear_factor=torch.zeros(3), window_factor=torch.ones(3))
    o = tkq.hedgehog(**given)
    want = tkq.flash_attn(given["q"], given["k"], given["v"], causal=True)
    torch.testing.assert_close(o, want, rtol=2**-7, atol=1e-3)


def test_no_tokens():
    given = {name: x.requires_grad_() for name, x in make(0).items()}
    o = tkq.hedgehog(**given)
    assert o.shape == (2, 0, 3, 64)
    o.sum().backward()
    assert all(x.grad is not None and not x.grad.any() for x in given.values())


def zeros(*shape, dtype=BF16):
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize("changed, error, words", [
    (dict(k=zeros(2, 200, 2, 64)), ValueError, r"k: shape is \(2, 200, 2, 64\), expected \(2, 200, 3, 64\)"),
    (dict(v=zeros(2, 200, 3, 64, dtype=torch.float16)), TypeError, "v is torch.float16, q is torch.bfloat16"),
    (dict(q_map=zeros(3, 64, 32, dtype=torch.float16)), TypeError, "q_map is torch.float16, q is torch.bfloat16"),
    (dict(q_map=zeros(3, 32, 64)), ValueError, r"q_map: shape is \(3, 32, 64\), expected"),
    (dict(k_map=zeros(3, 64, 64)), ValueError, r"k_map: shape is \(3, 64, 64\), expected \(3, 64, 32\)"),
    (dict(q_map=zeros(3, 64, 48), k_map=zeros(3, 64, 48)), NotImplementedError,
     "q_map: has 48 columns, supported are 32 and 64"),
    (dict(q=zeros(2, 200, 3, 96), k=zeros(2, 200, 3, 96), v=zeros(2, 200, 3, 96), q_map=zeros(3, 96, 32),
          k_map=zeros(3, 96, 32)), NotImplementedError, "q: has 96 columns, supported are 64 and 128"),
    (dict(linear_factor=zeros(3)), TypeError, "linear_factor: dtype is torch.bfloat16"),
    (dict(window_factor=zeros(1, dtype=F32)), ValueError, "window_factor: shape is"),
    (dict(q_map=zeros(3, 64, 40)[..., 8:].transpose(1, 2).contiguous().transpose(1, 2)), ValueError,
     "q_map: strides are .* the last dimension must be contiguous"),
    (dict(q=zeros(2, 200, 3, 65)[..., 1:]), ValueError, "q: strides are .* must be a multiple of 8 elements"),
    (dict(window_size=32), NotImplementedError, "window_size: is 32, supported is 64"),
    (dict(window_size=0), ValueError, "window_size"), (dict(window_size=64.0), TypeError, "window_size"),
])
def test_what_is_refused(changed, error, words):
    with pytest.raises(error, match=f"hedgehog: {words}"):
        tkq.hedgehog(**make() | changed)


@pytest.mark.parametrize("D, F", [(64, 64), (128, 64)])
def test_kernels_of_calls_are_those_that_are_shipped(D, F):
    recipes = {kernel.recipe for kernel in (*shipped(), *finish.shipped())}
    leaves = [x.requires_grad_() for x in make(300, D, F, B=1).values()]
    with fake_gpu.launches() as seen:
        o = tkq.hedgehog(*leaves)
        torch.autograd.grad(o, leaves, torch.zeros_like(o))
        # the maps' gradients of sequences are added up
        assert len(seen) == 5 and {recipe for recipe, _ in seen} <= recipes


def test_few_long_sequences_take_two_launches():
    given = make(1100, 128, 64, B=1)
    with fake_gpu.launches() as seen:
        tkq.hedgehog(**given)
    states, outputs = seen
    assert [recipe.args[0].part for recipe, _ in seen] == ["states", "outputs"]
    assert states[1][3:] == (2, 5, 2) and outputs[1][3:] == (2, 10, 2)
    assert states[1][1][9].shape == (2, 1, 3, 2, 64, 128) and states[1][1][10].shape == (2, 1, 3, 128)


@pytest.mark.parametrize("heads, tokens, want", [
    (64, 8192, (2, 64, 2)), (256, 2048, None), (32, 32768, (4, 128, 1)), (1, 1023, (2, 8, 2)), (1, 960, None),
    (67, 8192, None), (66, 8192, (2, 64, 2))])
def test_segments(heads, tokens, want):
    assert segments(heads, tokens, 132) == want


@pytest.mark.parametrize("heads", [1, 2, 3, 8, 31, 64])
def test_segments_have_all_chunks_and_their_states_all_before(heads):
    for chunks in range(16, 600, 7):
        count, each, finer = segments(heads, 64 * chunks, 132)
        assert (count - 1) * each < chunks <= count * each and each % finer == 0
        assert count * heads <= 132 and (count - 1) * finer * heads <= 132 and each // finer > 1


# With two warpgroups as in segments, below, which has all its code.
@pytest.mark.parametrize("dtype, D, F", [("bf16", 128, 64), ("fp16", 64, 64)])
@pytest.mark.sampled(when=lambda D: D == 64)
@pytest.mark.machine_code(recipe=lambda dtype, D, F: recipe(HedgehogSpec(dtype, D, F)))
def test_machine_code(dtype, D, F, machine_code):
    sass.assert_sass(machine_code, expectation(HedgehogSpec(dtype, D, F)))


# Of the states' registers most are free, those of outputs hold theirs and the products besides.
@pytest.mark.parametrize("part, keeps", [("states", False), ("outputs", False), ("outputs", True)])
@pytest.mark.sampled(when=lambda keeps: keeps)
@pytest.mark.machine_code(recipe=lambda part, keeps: recipe(HedgehogSpec("bf16", 128, 64, part, keeps)))
def test_machine_code_of_segments(part, keeps, machine_code):
    sass.assert_sass(machine_code, expectation(HedgehogSpec("bf16", 128, 64, part, keeps)))


@pytest.mark.machine_code(recipe=lambda: window_recipe(WindowSpec("bf16", 128)))
def test_machine_code_of_the_windows_gradients(machine_code):
    sass.assert_sass(machine_code, of_window(WindowSpec("bf16", 128)))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("made, wanted", [(queries_recipe, of_queries), (keys_recipe, of_keys)])
@pytest.mark.sampled(when=lambda dtype: dtype == "fp16")
@pytest.mark.machine_code(recipe=lambda dtype, made, wanted: made(GradientSpec(dtype, 128)))
def test_machine_code_of_gradients(dtype, made, wanted, machine_code):
    sass.assert_sass(machine_code, wanted(GradientSpec(dtype, 128)))


OTHERS = LinearSpec("bf16", 128, 128, reverse=True, others=True)


@pytest.mark.machine_code(recipe=lambda: linear_recipe(OTHERS))
def test_machine_code_of_other_chunks(machine_code):
    """Two products a chunk: the state with queries, and what it takes up; the source has five waits for them, of at
    least eight instructions."""
    few, some, many = plan(OTHERS).registers
    sass.assert_sass(machine_code, Expectation(
        tensor=12, waits_per_mma=0.7, instructions=("UTMALDG", "UTMASTG", "USETMAXREG"),
        roles=((few, 1), (some, 1), (many, plan(OTHERS).groups))))


@pytest.mark.parametrize("given, words", [
    (dict(dtype="fp32"), "dtype is 'fp32'"), (dict(head_dim=96), "head_dim is 96"),
    (dict(features=16), "features is 16"), (dict(part="states", keeps=True), "keeps")])
def test_what_a_spec_refuses(given, words):
    with pytest.raises(ValueError, match=f"HedgehogSpec: {words}"):
        HedgehogSpec(**dict(dtype="bf16", head_dim=64, features=32) | given)


@pytest.mark.parametrize("given", [dict(gate="token"), dict(delta="fp32"), dict(strict=True)])
def test_what_other_chunks_alone_go_without(given):
    with pytest.raises(ValueError, match="LinearSpec: others"):
        LinearSpec("bf16", 64, 64, others=True, **given)


@pytest.mark.parametrize("linear, window", [(1.0, 0.0), (1e6, 0.5)])
def test_gradients_where_a_block_weighs_far_more_than_those_behind_it(linear, window):
    """Its own part is in no sum from which it would have to be taken again."""
    factors = dict(linear_factor=torch.full((3,), linear), window_factor=torch.full((3,), window))
    given = make(193, 64, 32, B=1) | factors
    leaves, wide = ([x.to(t).requires_grad_() if t else x.requires_grad_() for x in given.values()]
                    for t in (None, torch.float64))
    do = torch.randn_like(given["q"])
    found = torch.autograd.grad(tkq.hedgehog(*leaves), leaves[:5], do)
    want = torch.autograd.grad(reference.hedgehog(*wide), wide[:5], do.double())
    for mine, exact in zip(found, want):
        assert (mine.double() - exact).norm() <= 1e-2 * exact.norm()
