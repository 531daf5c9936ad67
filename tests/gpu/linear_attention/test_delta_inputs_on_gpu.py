"""The options of tkq.gated_delta_rule as layers call it, against float64 from the first step on."""
import pytest
import torch
import torch.nn.functional as F

import tkq
from tests.gpu.linear_attention.test_delta_forward import chunked
from tests.helpers import delta_layers
from tests.helpers.ops import every_op_checks as checks
from tests.helpers.ops.every_op import Maker
from tests.helpers.sanitizer.nan_fill import poisoned
from tkq.linear_attention.channels.decays import column_decays
from tkq.reference.linear_attention import linear_attn as recurrence
from tkq.testing import assert_2x

BF16 = torch.bfloat16


def make(S=130, K=64, V=128, dtype=BF16):
    return delta_layers.tensors(Maker("cuda", S, 0, dtype), K, V)


def by_torch(q, k, v, g, beta, A_log, dt_bias):
    """What the options make of q, k, g and beta, in plain PyTorch in float32: (q, k, v, g, beta)."""
    q, k = ((x.float() * (x.float().square().sum(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype) for x in (q, k))
    return q, k, v, -A_log.float().exp() * F.softplus(g.float() + dt_bias.float()), 2 * beta


@pytest.mark.parametrize("S", [1, 65, 300])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.sampled(when=lambda S, dtype: (S == 65) == (dtype == torch.float16))
def test_results(S, dtype):
    given = make(S, dtype=dtype)
    with poisoned():
        o, state = delta_layers.call(**given, output_final_state=True)
    want, last = delta_layers.exact(**given)
    peer, peer_state = chunked(*by_torch(**given), None)
    assert_2x(o, want, peer, what="o")
    assert_2x(state.flatten(0, 2), last.flatten(0, 2), peer_state.flatten(0, 2), what="final state")


@pytest.mark.parametrize("scale", [1e-4, 1.0, 100.0])
def test_lengths_of_keys(scale):
    """Near the eps, and where squares would leave fp16."""
    given = make(dtype=torch.float16)
    given |= {name: given[name] * scale for name in ("q", "k")}
    with poisoned():
        o = delta_layers.call(**given)
    assert_2x(o, delta_layers.exact(**given)[0], chunked(*by_torch(**given), None)[0], what="o")


def test_gradients():
    given = make()
    leaves = {name: x.detach().requires_grad_() for name, x in given.items()}
    wide = {name: x.detach().double().requires_grad_() for name, x in given.items()}
    do = torch.randn_like(given["v"])
    with poisoned():
        mine = torch.autograd.grad(delta_layers.call(**leaves), list(leaves.values()), do)
    peer = torch.autograd.grad(tkq.gated_delta_rule(*by_torch(**leaves)), list(leaves.values()), do)
    exact = torch.autograd.grad(delta_layers.exact(**wide)[0], list(wide.values()), do.double())
    for name, a, b, c in zip(leaves, mine, exact, peer):
        assert a.dtype == leaves[name].dtype
        error, theirs = ((x.double() - b).norm() / b.norm() for x in (a, c))
        assert error <= 1.1 * theirs + 2**-9, (name, error, theirs)


@pytest.mark.parametrize("bound", [None, -5.0])
def test_gates_of_columns(bound):
    """As Kimi's layer has them, results and gradients, beside the same with gates by PyTorch: of o, and of gates that
    underflow, too."""
    given = make(K=64, V=64)
    tokens = given["v"].shape[:3]
    given |= dict(g=4 * torch.randn(*tokens, 64, device="cuda").to(BF16), dt_bias=torch.randn(4, 64, device="cuda"))
    given["g"][:, 40:44] = 100.0
    options = dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, gate_lower_bound=bound)

    def decays(g, A_log, dt_bias):
        x, factor = g + dt_bias, A_log.exp()[:, None]
        return -factor * F.softplus(x, threshold=50) if bound is None else bound * (factor * x).sigmoid()

    def call(leaves, do, of):
        leaves = {name: x.detach().to(of(x)).requires_grad_() for name, x in leaves.items()}
        q, k, v, g, beta, *gates = leaves.values()
        if of is as_it_is:
            o = tkq.gated_delta_rule(q, k, v, g, beta, A_log=gates[0], dt_bias=gates[1], **options)
        else:
            wide = torch.float64 if of is exactly else torch.float32
            q, k = ((x.to(wide) * (x.to(wide).square().sum(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)
                    for x in (q, k))
            g = decays(g.to(wide), *gates)
            if of is exactly:
                o, _ = recurrence(q, k, v, g, beta=beta)
            else:
                o = tkq.gated_delta_rule(q, k, v, g, beta)
        return o.detach(), *torch.autograd.grad(o, list(leaves.values()), do.to(o.dtype))

    as_it_is, exactly, by_torch = (lambda x: x.dtype), (lambda x: torch.float64), (lambda x: x.dtype)
    do = torch.randn_like(given["v"])
    with poisoned():
        mine = call(given, do, as_it_is)
    want, peer = call(given, do, exactly), call(given, do, by_torch)
    for name, a, b, c in zip(("o", *given), mine, want, peer):
        error, theirs = ((x.double() - b).norm() / b.norm() for x in (a, c))
        assert error <= 2 * theirs + 2**-8, (name, error, theirs)


def test_rows_of_any_length_with_gates_of_columns():
    """Without gradients the rule's kernel divides by lengths: near the eps, of zeros, of large numbers; by one product,
    by one for each block, by levels; with states, of packed sequences, whose neighbours are NaN."""
    torch.manual_seed(0)
    for scale, decay in ((1.0, 0.5), (1e-4, 5.0), (1e5, 5.0), (1.0, 60.0)):
        q, k, v = (torch.randn(1, 300, h, 64, device="cuda").to(BF16) for h in (2, 2, 4))
        q, k = q * scale, k * scale
        q[:, 7], k[:, 70:75] = 0, 0
        g, beta = -decay * torch.rand(1, 300, 4, 64, device="cuda"), torch.rand(1, 300, 4, device="cuda")
        g[:, 100] = 0
        initial = torch.randn(1, 4, 64, 64, device="cuda")
        wide = [x.double() for x in (q, k)]
        exact = [x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in wide]
        want, last = recurrence(*exact, v.double(), g.double(), beta=beta.double(), initial_state=initial.double())
        rounded = [x.to(BF16) for x in exact]
        one = torch.tensor([0, 300], device="cuda", dtype=torch.int32)  # packed, as other tests' kernels are
        peer, peer_state = tkq.gated_delta_rule(*rounded, v, g, beta, None, initial, True, cu_seqlens=one)
        with poisoned():
            o, state = tkq.gated_delta_rule(q, k, v, g, beta, None, initial, True, use_qk_l2norm_in_kernel=True)
        for mine, of, other in ((o, want, peer), (state, last, peer_state)):
            assert_2x(mine.flatten(0, -2), of.flatten(0, -2), other.flatten(0, -2), what=f"{scale} {decay}")
        more = [F.pad(x, (0, 0) * (x.dim() - 2) + (30, 10), value=float("nan")) for x in (q, k, v, g, beta)]
        cu = torch.tensor([30, 330], device="cuda")
        packed, last_of_it = tkq.gated_delta_rule(*more, None, initial, True, True, cu_seqlens=cu)
        assert relative(packed[:, 30:330], o) < 2**-9 and relative(last_of_it, state) < 2**-9
        assert not packed[:, :30].any() and not packed[:, 330:].any()
        recorded, _ = tkq.gated_delta_rule(q.requires_grad_(), k, v, g, beta, None, initial, True, True, cu_seqlens=one)
        assert recorded.requires_grad and relative(recorded, o) < 2**-7


def relative(x, y):
    return (x.double() - y.double()).norm() / y.double().norm()


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_decays_of_columns(dtype):
    """The kernel alone against float64: any number of tokens, slices of a packed tensor, numbers for which decays are 0
    or nothing decays; the same bits."""
    torch.manual_seed(0)
    for tokens, bound in ((1, None), (37, None), (130, None), (37, -5.0)):
        packed = (3 * torch.randn(2, tokens, 6, 64, device="cuda")).to(dtype)
        packed[0, 0, 0, :8] = torch.tensor([50.0, -50.0, 0.0, -15.0, 15.0, -85.0, 88.0, 1e-3])
        given = packed[:, :, :3], torch.rand(3, device="cuda"), torch.randn(3, 64, device="cuda")
        given[2][0, :8] = 0
        leaves, wide = ([x.detach().to(kind or x.dtype).requires_grad_() for x in given]
                        for kind in (None, torch.float64))
        with poisoned():
            y = column_decays(*leaves, bound)
        x, factor = wide[0] + wide[2], wide[1].exp()[:, None]
        want = -factor * F.softplus(x, threshold=1e9) if bound is None else bound * (factor * x).sigmoid()
        assert ((y - want).abs() <= 2e-5 * want.abs() + 1e-36).all()
        dy = torch.randn_like(y)
        with poisoned():
            found = torch.autograd.grad(y, leaves, dy)
        exact = torch.autograd.grad(want, wide, dy.double())
        for a, b, of, room in zip(found, exact, leaves, (2**-8, 1e-5, 1e-5)):
            assert a.dtype == of.dtype and (a - b).norm() <= room * b.norm()
        assert all(map(torch.equal, found, torch.autograd.grad(column_decays(*leaves, bound), leaves, dy)))


def test_the_same_bits():
    given = {name: x.requires_grad_() for name, x in make(300).items()}
    do = torch.randn_like(given["v"])
    def run():
        o = delta_layers.call(**given)
        return o, *torch.autograd.grad(o, list(given.values()), do)
    first = run()
    for _ in range(3):
        assert all(map(torch.equal, run(), first))


def test_in_a_cuda_graph():
    """Also what is made anew in each call: the norm's weight."""
    given = make()
    delta_layers.call(**given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = delta_layers.call(**given)
    for x in given.values():
        x.copy_(x.flip(0) * 0.5)
    graph.replay()
    assert torch.equal(found, delta_layers.call(**given))


@pytest.mark.slow  # test_every_op.py compiles each function every day
def test_compiled():
    checks.compiles_once(delta_layers.CASE, "cuda", sizes=checks.ROWS[:2])
