"""tkq.mamba2_ssd on the CPU: results, gradients, what is refused, and its kernels."""
import itertools
import math

import pytest
import torch

import tkq
from tests.helpers.emulation import fake_gpu
from tkq.linear_attention.catalog import shipped
from tkq.linear_attention.config import LinearConfig
from tkq.linear_attention.finish import catalog as finish
from tkq.linear_attention.plan import SHARED, plan
from tkq.linear_attention.spec import LinearSpec, SsdSpec
from tkq.reference.ssd import mamba2_ssd as recurrence

BF16, F32 = torch.bfloat16, torch.float32
NAMES = "x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states"


def make(P=48, N=32, S=7, H=4, G=2):
    """By name; two heads share one of B and C."""
    torch.manual_seed(0)
    return dict(x=torch.randn(2, S, H, P).to(BF16), dt=torch.randn(2, S, H).to(BF16), A=-torch.rand(H),
                B=torch.randn(2, S, G, N).to(BF16) / 4, C=torch.randn(2, S, G, N).to(BF16) / 4, D=torch.randn(H),
                z=torch.randn(2, S, H, P).to(BF16), dt_bias=torch.randn(H), initial_states=torch.randn(2, H, P, N))


def test_results():
    given = make()
    y, states = tkq.mamba2_ssd(**given, dt_softplus=True, return_final_states=True)
    assert (y.dtype, states.dtype, states.shape) == (BF16, F32, given["initial_states"].shape)
    assert y.is_contiguous() and states.is_contiguous()
    exact, last = recurrence(**{name: x.double() for name, x in given.items()}, dt_softplus=True)
    torch.testing.assert_close(y.double(), exact, rtol=2**-7, atol=1e-5)
    torch.testing.assert_close(states.double(), last, rtol=1e-5, atol=1e-5)
    alone = tkq.mamba2_ssd(**given, dt_softplus=True)
    assert isinstance(alone, torch.Tensor) and torch.equal(alone, y)


@pytest.mark.parametrize("used", ["y", "states", "both"])
@pytest.mark.parametrize("limit", [(0.0, math.inf), (0.3, 1.0)])
def test_gradients(used, limit):
    leaves = [x.requires_grad_() for x in make().values()]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    results, gradients = [], []
    for found in (tkq.mamba2_ssd(*leaves, True, limit, True), recurrence(*wide, True, limit)):
        results.append(found[:1] if used == "y" else found[1:] if used == "states" else found)
    dy = [torch.randn_like(y) for y in results[0]]
    for found, of in zip(results, (leaves, wide)):
        gradients.append(torch.autograd.grad(found, of, [x.to(y.dtype) for x, y in zip(dy, found)],
                                             allow_unused=True))
    for name, x, mine, exact in zip(NAMES, leaves, *gradients):
        exact = torch.zeros_like(x) if exact is None else exact
        assert mine.dtype == x.dtype
        torch.testing.assert_close(mine.double(), exact.double(), rtol=2**-7, atol=2e-4, msg=name)


def test_without_a_step_nothing_changes():
    given = make() | dict(dt=torch.zeros(2, 7, 4), dt_bias=None)
    assert torch.equal(tkq.mamba2_ssd(**given, return_final_states=True)[1], given["initial_states"])


def test_no_tokens():
    given = make(S=0)
    y, states = tkq.mamba2_ssd(**given, return_final_states=True)
    assert y.shape == (2, 0, 4, 48) and torch.equal(states, given["initial_states"])


def zeros(*shape, dtype=BF16):
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize("changed, error, words", [
    (dict(B=zeros(2, 7, 3, 32), C=zeros(2, 7, 3, 32)), ValueError,
     "x has 4 heads, B has 3; allowed are from 1 on, x's a multiple of B's"),
    (dict(C=zeros(2, 7, 1, 32)), ValueError, r"C: shape is \(2, 7, 1, 32\), expected \(2, 7, 2, 32\)"),
    (dict(B=zeros(2, 7, 2, 32, dtype=torch.float16)), TypeError, "B is torch.float16, x is torch.bfloat16"),
    (dict(z=zeros(2, 7, 4, 48, dtype=torch.float16)), TypeError, "z is torch.float16, x is torch.bfloat16"),
    (dict(dt=zeros(2, 7, 2)), ValueError, r"dt: shape is \(2, 7, 2\), expected \(2, 7, 4\)"),
    (dict(A=zeros(4)), TypeError, "A: dtype is torch.bfloat16"),
    (dict(A=zeros(2, dtype=F32)), ValueError, r"A: shape is \(2\), expected \(4\)|A: shape is \(2,\), expected \(4\)"),
    (dict(D=zeros(4, 32)), ValueError, r"D: shape is \(4, 32\), expected \(4, 48\)"),
    (dict(D=zeros(1, 4, 48)), ValueError, "D: has 3 dimensions"),
    (dict(dt_bias=zeros(1, 4)), ValueError, "dt_bias: shape is"),
    (dict(z=zeros(2, 7, 4, 64)), ValueError, "z: shape is"),
    (dict(initial_states=zeros(2, 4, 32, 48, dtype=F32)), ValueError, r"initial_states: shape is \(2, 4, 32, 48\)"),
    (dict(x=zeros(2, 7, 4, 40), z=None, initial_states=None), NotImplementedError,
     "x: P is 40, supported are multiples of 16 from 32 to 256"),
    (dict(B=zeros(2, 7, 2, 272), C=zeros(2, 7, 2, 272), initial_states=None), NotImplementedError,
     "B: N is 272, supported are multiples of 16 from 32 to 256"),
    (dict(B=zeros(2, 7, 2, 33)[..., 1:]), ValueError, "B: strides are .* must be a multiple of 8 elements"),
    (dict(z=zeros(2, 7, 48, 4).mT), ValueError, "z: strides are .* the last dimension must be contiguous"),
    (dict(dt_limit=(1.0, 0.5)), ValueError, r"dt_limit: got \(1.0, 0.5\), allowed are two numbers in ascending order"),
])
def test_what_is_refused(changed, error, words):
    with pytest.raises(error, match=f"mamba2_ssd: ({words})"):
        tkq.mamba2_ssd(**make() | changed)


def test_too_many_sequences():
    x = zeros(1, 1, 1, 32).expand(65536, 1, 1, 32)
    with pytest.raises(NotImplementedError, match="x: has 65536 sequences, supported are up to 65535"):
        tkq.mamba2_ssd(x, zeros(1, 1, 1).expand(65536, 1, 1), zeros(1, dtype=F32), x, x)


@pytest.mark.parametrize("N", [64, 128])
@pytest.mark.parametrize("gated", [False, True])
def test_kernels_of_calls_are_those_that_are_shipped(N, gated):
    recipes = {kernel.recipe for kernel in (*shipped(), *finish.shipped())}
    given = make(64, N) | ({} if gated else dict(z=None))
    without = given | dict(initial_states=None)
    with fake_gpu.launches() as seen:
        tkq.mamba2_ssd(**without, dt_softplus=True)
        tkq.mamba2_ssd(**given, dt_softplus=True, return_final_states=True)
        assert len(seen) == 2 and {recipe for recipe, _ in seen} <= recipes
        for tensors, final in ((without, False), (given, True)):
            seen.clear()
            leaves = {name: x.detach().requires_grad_() for name, x in tensors.items() if x is not None}
            found = tkq.mamba2_ssd(**leaves, dt_softplus=True, return_final_states=final)
            found = found if final else (found,)
            torch.autograd.grad(found, list(leaves.values()), [torch.zeros_like(x) for x in found])
            # of two heads that share B and C, where a cluster adds up what they give, no launch does
            assert len(seen) == (8 if gated else 7) - 2 * (N > 64) and {recipe for recipe, _ in seen} <= recipes


def test_parts_of_other_widths_are_summed_alike():
    """Of P 144, 80 columns and 64, which alone would be laid out otherwise: their outputs are added up."""
    shapes = (3, 3000, 16, 144), (3, 3000, 16), (16,), (3, 3000, 8, 96), (3, 3000, 8, 96)
    leaves = [torch.zeros(shape, dtype=F32 if len(shape) == 1 else BF16, requires_grad=True) for shape in shapes]
    with fake_gpu.launches() as seen:
        y = tkq.mamba2_ssd(*leaves)
        found = torch.autograd.grad(y, leaves, torch.zeros_like(y))
        assert [x.shape for x in found] == [x.shape for x in leaves]
    specs = [recipe.args[0] for recipe, _ in seen if isinstance(recipe.args[0], LinearSpec)]
    of_parts = [spec for spec in specs if spec.value_dim == 96 and spec.writes]
    for dot in (True, False):
        parts = {spec.head_dim: spec.summed for spec in of_parts if spec.dot == dot}
        assert parts.keys() >= {64, 80} and parts[64] == parts[80]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("states", [False, True])
def test_kernels_of_two_heads_are_those_that_are_shipped(gated, states):
    recipes = {kernel.recipe for kernel in (*shipped(), *finish.shipped())}
    given = make(64, 64, H=160, G=1) | ({} if gated else dict(z=None)) | ({} if states else dict(initial_states=None))
    with fake_gpu.launches() as seen:
        leaves = {name: x.detach().requires_grad_() for name, x in given.items() if x is not None}
        found = tkq.mamba2_ssd(**leaves, dt_softplus=True, return_final_states=states)
        found = found if states else (found,)
        torch.autograd.grad(found, list(leaves.values()), [torch.zeros_like(x) for x in found])
        assert {recipe for recipe, _ in seen} <= recipes
        of_two = [recipe for recipe, _ in seen if getattr(recipe.args[-1], "heads", 1) == 2]
        assert len(of_two) == (2 if gated else 1)  # the forward, and with z once more


@pytest.mark.parametrize("P", range(32, 257, 16))
@pytest.mark.parametrize("N", [32, 64, 128])
def test_each_launch_has_room(P, N):
    ssd = SsdSpec("bf16", "fp32", True, "fp32")
    part = P if P <= 128 else -(-P // 32) * 16
    for spec in (LinearSpec("bf16", N, P, "token", ssd=ssd),
                 LinearSpec("bf16", N, P, "token", ssd=SsdSpec("bf16", "fp32", True, "fp32", gated=True)),
                 LinearSpec("bf16", part, N, "token", dot=True, ssd=ssd),
                 LinearSpec("bf16", N, P, "token", dot=True, reverse=True, ssd=ssd)):
        c = plan(spec)
        tiles = c.stages * (4 * 64 * spec.head_dim + c.groups * (1 + spec.has_x) * 8192)
        rest = (c.score_stages + c.groups * c.outputs + 2 * spec.dot) * 8192 + 2048 * (c.score_stages - 1)
        assert c.stages >= 2 and tiles + rest <= SHARED


@pytest.mark.parametrize("more, scores", [(dict(), 2), (dict(value_dim=128), 1), (dict(dot=True), 1),
                                          (dict(gate="none"), 1), (dict(delta="fp32"), 1)])
def test_scores_in_ping_pong(more, scores):
    """Of one warpgroup of the state, with gates; where four chunks' tokens fit, so that z of 64 columns has none."""
    spec = LinearSpec(**dict(dtype="bf16", head_dim=128, value_dim=64, gate="token") | more)
    c = plan(spec)
    assert (c.scores, c.score_stages, c.stages % c.scores) == (scores, 2 * scores, 0)
    for gated in (False, True):
        ssd = SsdSpec("bf16", "fp32", True, "fp32", gated=gated)
        assert plan(LinearSpec("bf16", 128, 64, "token", ssd=ssd)).scores == 2 - gated
        assert plan(LinearSpec("bf16", 64, 64, "token", ssd=ssd)).scores == 2
    with pytest.raises(ValueError, match="LinearConfig: stages and score_stages are 3 and 4, allowed are multiples"):
        LinearConfig(stages=3, scores=2, score_stages=4)


def test_a_launch_of_states_alone_has_four_stages_of_factors():
    ssd = SsdSpec("bf16", "fp32", True)
    for K, V, steps in itertools.product((32, 64, 128), (32, 64, 128), (None, ssd)):
        c = plan(LinearSpec("bf16", K, V, "token", None, "fp32", part="states", ssd=steps))
        tiles = c.stages * (2 * 64 * K + c.groups * 8192)  # no queries, no outputs
        assert c.stages == c.score_stages == 4 and tiles + 4 * c.heads * 5 * 256 <= SHARED


@pytest.mark.parametrize("K, V", [(144, 256), (256, 144), (256, 256)])
def test_gates_gradients_of_wide_states(K, V):
    """Their sums have a part for each 64 columns, of both halves of V."""
    given = make(V, K) | dict(z=None)
    leaves = {name: x.detach().requires_grad_() for name, x in given.items() if x is not None}
    with fake_gpu.launches() as seen:
        y = tkq.mamba2_ssd(**leaves, dt_softplus=True)
        torch.autograd.grad(y, [leaves["dt"], leaves["A"]], torch.zeros_like(y))
        q, k, v = (torch.zeros(1, 128, 2, n).bfloat16().requires_grad_() for n in (K, K, V))
        g, beta = (torch.zeros(1, 128, 2, requires_grad=True) for _ in range(2))
        for o in (tkq.linear_attn(q, k, v, g), tkq.gated_delta_rule(q, k, v, g, beta)):
            torch.autograd.grad(o, [g], torch.zeros_like(o))
    sums = [(recipe.args[0].x, recipe.args[0].less) for recipe, _ in seen if "suffix.kernel" in recipe.builder]
    of_keys = 2 * -(-K // 64)
    assert sums == [(of_keys, 1), (of_keys, -(-V // 64)), (of_keys, of_keys)]  # Mamba-2, linear attention, delta rule


@pytest.mark.parametrize("given, words", [
    (dict(gate="none"), "ssd, allowed is with the gate 'token'"), (dict(strict=True), "ssd"),
    (dict(delta="fp32"), "ssd"),
    (dict(ssd=SsdSpec("bf16", gated=True), reverse=True), "ssd.gated"),
    (dict(ssd=SsdSpec("bf16", gated=True), dot=True), "ssd.gated"),
    (dict(ssd=SsdSpec("bf16", skip="fp32", skip_gradient=True)), "ssd.skip_gradient")])
def test_what_a_spec_refuses(given, words):
    with pytest.raises(ValueError, match=f"LinearSpec: {words}"):
        LinearSpec(**dict(dtype="bf16", head_dim=64, value_dim=64, gate="token", ssd=SsdSpec("bf16")) | given)


@pytest.mark.parametrize("given, words", [(dict(dt="int32"), "dt is 'int32'"), (dict(bias="fp64"), "bias is 'fp64'"),
                                          (dict(skip="e4m3"), "skip is"), (dict(skip_dims=3), "skip_dims is 3")])
def test_what_a_spec_of_steps_refuses(given, words):
    with pytest.raises(ValueError, match=f"SsdSpec: {words}"):
        SsdSpec(**dict(dt="bf16") | given)
