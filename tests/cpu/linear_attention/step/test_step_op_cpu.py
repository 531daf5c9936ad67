"""tkq.linear_attn_step, tkq.gated_delta_rule_step and tkq.ssd_step on the CPU: results, what is refused, which kernels
calls take."""
import pytest
import torch
import torch.nn.functional as F

import tkq
from tests.helpers.emulation import fake_gpu
from tkq.linear_attention.step.catalog import shipped
from tkq.linear_attention.step.launch import layout_of
from tkq.reference.linear_attention import linear_attn as recurrence

BF16 = torch.bfloat16


def make(K=32, V=48, N=3, T=2):
    """The arguments of gated_delta_rule_step: two heads of v share one of q and k, keys have the length 1."""
    torch.manual_seed(0)
    q, k = (F.normalize(torch.randn(N, T, 2, K), dim=-1).to(BF16) for _ in range(2))
    return dict(q=q, k=k, v=torch.randn(N, T, 4, V).to(BF16), g=-torch.rand(N, T, 4), beta=torch.rand(N, T, 4),
                state=torch.randn(5, 4, K, V), state_indices=torch.tensor([4, 0, 2])[:N])


def without_beta(given):
    return {name: x for name, x in given.items() if name != "beta"}


def space(K=32, P=48, N=3, **changed):
    """The arguments of ssd_step."""
    torch.manual_seed(0)
    return dict(state=torch.randn(5, 4, P, K), x=torch.randn(N, 4, P).to(BF16), dt=torch.rand(N, 4), A=-torch.rand(4),
                B=torch.randn(N, 2, K).to(BF16), C=torch.randn(N, 2, K).to(BF16), D=torch.rand(4),
                state_batch_indices=torch.tensor([4, 0, 2])[:N]) | changed


@pytest.mark.parametrize("name", ["linear_attn_step", "gated_delta_rule_step"])
@pytest.mark.parametrize("v_first", [False, True])
def test_results(name, v_first):
    given = make()
    if name == "linear_attn_step":
        given = without_beta(given)
    state, rows = given["state"], given["state_indices"]
    exact, last = recurrence(*(given[x].double() for x in "qkv"), given["g"], 0.3, state[rows],
                             beta=given.get("beta"))
    before = state.clone()
    if v_first:
        given["state"] = state = state.mT.contiguous()
    o = getattr(tkq, name)(**given, scale=0.3, state_v_first=v_first)
    assert o.dtype == BF16 and o.is_contiguous()
    torch.testing.assert_close(o.double(), exact, rtol=2**-7, atol=1e-5)
    found = state.mT if v_first else state
    torch.testing.assert_close(found[rows].double(), last, rtol=1e-5, atol=1e-5)
    assert torch.equal(found[[1, 3]], before[[1, 3]])


def test_a_state_space_is_the_recurrence():
    given = space(dt_bias=torch.randn(4), dt_softplus=True, z=torch.randn(3, 4, 48).to(BF16))
    state, rows = given["state"], given["state_batch_indices"]
    dt = F.softplus(given["dt"] + given["dt_bias"]).double()
    x = given["x"].double()
    exact, last = recurrence(*(given[name].double()[:, None] for name in "CB"), (dt[..., None] * x)[:, None],
                             (dt * given["A"])[:, None], 1.0, state[rows].mT)
    exact = (exact[:, 0] + given["D"].double()[:, None] * x) * F.silu(given["z"].double())
    y = tkq.ssd_step(**given)
    torch.testing.assert_close(y.double(), exact, rtol=2**-7, atol=1e-5)
    torch.testing.assert_close(state[rows].double(), last.mT, rtol=1e-5, atol=1e-5)


def test_rows_that_the_pool_does_not_have():
    given = make(N=3) | dict(state_indices=torch.tensor([-1, 5, 1 << 40]))
    before = given["state"].clone()
    assert not tkq.gated_delta_rule_step(**given).any() and torch.equal(given["state"], before)
    y = tkq.ssd_step(**space(state_batch_indices=torch.tensor([-1, 3, 5])))
    assert y.flatten(1).any(1).tolist() == [False, True, False]


def test_accepted_tokens():
    given = make() | dict(state_indices=torch.tensor([[0, 1], [2, -1], [3, 4]]),
                          num_accepted_tokens=torch.tensor([2, 1, 3]))
    state, before = given["state"], given["state"].clone()
    o = tkq.gated_delta_rule_step(**given)
    plain = {name: given[name][:2] for name in ("q", "k", "v", "g", "beta")}
    own = before[[1, 2]].clone()
    assert torch.equal(o[:2], tkq.gated_delta_rule_step(**plain, state=own)) and not o[2].any()
    assert torch.equal(state[1], own[0]) and torch.equal(state[[3, 4]], before[[3, 4]])
    first = before[[1, 2]].clone()
    tkq.gated_delta_rule_step(**{name: x[:, :1] for name, x in plain.items()}, state=first)
    assert torch.equal(state[[0, 2]], first)


def test_out():
    given, wide = make(), torch.full((3, 4, 4, 64), 7.0, dtype=BF16)
    out, want = wide[:, 1:3, :, 8:56], tkq.gated_delta_rule_step(**given | dict(state=given["state"].clone()))
    assert tkq.gated_delta_rule_step(**given, out=out) is out and torch.equal(out, want)
    assert (wide[:, 0] == 7).all() and (wide[..., :8] == 7).all() and (wide[..., 56:] == 7).all()


@pytest.mark.parametrize("N, T", [(0, 1), (3, 0)])
def test_nothing_to_do(N, T):
    given = make(N=N, T=T)
    before = given["state"].clone()
    o = tkq.gated_delta_rule_step(**given)
    assert o.shape == (N, T, 4, 48) and torch.equal(given["state"], before)


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


NOT_APART = zeros(5, 4, 1, 48).expand(5, 4, 32, 48)


@pytest.mark.parametrize("changed, error, words", [
    (dict(beta=zeros(3, 2, 2)), ValueError, r"beta: shape is \(3, 2, 2\), expected \(3, 2, 4\)"),
    (dict(g=zeros(4)), ValueError, r"g: has 1 dimensions"),
    (dict(g=zeros(3, 2, 4, 16)), ValueError, r"g: shape is \(3, 2, 4, 16\), expected \(3, 2, 4, 32\)"),
    (dict(g=zeros(3, 2, 4, 33)[..., 1:]), ValueError, "g: strides are .* a multiple of 4 elements"),
    (dict(k=zeros(3, 2, 4, 32, dtype=BF16)), ValueError, r"k: shape is \(3, 2, 4, 32\), expected \(3, 2, 2, 32\)"),
    (dict(v=zeros(3, 2, 4, 40, dtype=BF16)), NotImplementedError, "v: V is 40"),
    (dict(v=zeros(3, 2, 3, 48, dtype=BF16)), ValueError, "v has 3 heads, q has 2"),
    (dict(v=zeros(3, 2, 4, 48, dtype=torch.float16)), TypeError, "v is torch.float16, q is torch.bfloat16"),
    (dict(q=zeros(3, 2, 2, 288, dtype=BF16), k=zeros(3, 2, 2, 288, dtype=BF16)), NotImplementedError, "q: K is 288"),
    (dict(q=zeros(3, 2, 2, 33, dtype=BF16)[..., 1:]), ValueError, "q: strides are .* a multiple of 8 elements"),
    (dict(state=zeros(5, 4, 48, 32)), ValueError, r"state: shape is \(5, 4, 48, 32\), expected \(any, 4, 32, 48\)"),
    (dict(state=zeros(5, 4, 32, 48, dtype=torch.float16)), TypeError, "state: dtype is torch.float16"),
    (dict(state=NOT_APART), ValueError, "state: .* share memory"),
    (dict(state=zeros(2, 4, 32, 48), state_indices=None), ValueError, "state: has 2 rows for 3 sequences"),
    (dict(state_indices=zeros(4, dtype=torch.int32)), ValueError, r"state_indices: shape is \(4,\), expected \(3\)"),
    (dict(state_indices=zeros(3)), TypeError, "state_indices: dtype is torch.float32"),
    (dict(num_accepted_tokens=zeros(3, dtype=torch.int32)), ValueError,
     r"state_indices: shape is \(3,\), expected \(3, 2\)"),
    (dict(num_accepted_tokens=zeros(3, dtype=torch.int32), state_indices=None), ValueError,
     "num_accepted_tokens is given without state_indices"),
    (dict(num_accepted_tokens=zeros(2, dtype=torch.int32)), ValueError, r"num_accepted_tokens: shape is \(2,\)"),
    (dict(out=zeros(3, 2, 4, 32, dtype=BF16)), ValueError, r"out: shape is \(3, 2, 4, 32\), expected \(3, 2, 4, 48\)"),
    (dict(out=zeros(3, 2, 4, 48, dtype=torch.float16)), TypeError, "out is torch.float16"),
    (dict(out=zeros(1, 2, 4, 48, dtype=BF16).expand(3, -1, -1, -1)), ValueError, "out: .* share memory"),
])
def test_what_is_refused(changed, error, words):
    with pytest.raises(error, match=f"gated_delta_rule_step: {words}"):
        tkq.gated_delta_rule_step(**make() | changed)


@pytest.mark.parametrize("changed, error, words", [
    (dict(A=-torch.rand(4, 48, 32)), NotImplementedError, r"A: strides are .* within a head.* supported .* \(4,\)"),
    (dict(dt=torch.rand(3, 4, 48)), NotImplementedError, "dt: strides are"),
    (dict(dt=torch.rand(3, 2)), ValueError, r"dt: shape is \(3, 2\), expected \(3, 4\)"),
    (dict(D=torch.rand(4, 47)), ValueError, r"D: shape is \(4, 47\), expected \(4, 48\)"),
    (dict(x=zeros(3, 48, dtype=BF16)), ValueError, "x: has 2 dimensions"),
    (dict(C=zeros(3, 1, 32, dtype=BF16)), ValueError, r"C: shape is \(3, 1, 32\), expected \(3, 2, 32\)"),
    (dict(B=zeros(3, 3, 32, dtype=BF16), C=zeros(3, 3, 32, dtype=BF16)), ValueError, "x has 4 heads, B has 3"),
    (dict(z=zeros(3, 4, 48, dtype=torch.float16)), TypeError, "z is torch.float16, x is torch.bfloat16"),
    (dict(state=zeros(5, 4, 32, 48)), ValueError, r"state: shape is \(5, 4, 32, 48\)"),
    (dict(state_batch_indices=zeros(3, 1, dtype=torch.int32), num_accepted_tokens=zeros(3, dtype=torch.int32)),
     ValueError, "num_accepted_tokens: x has no dimension of tokens"),
])
def test_what_a_state_space_refuses(changed, error, words):
    with pytest.raises(error, match=f"ssd_step: {words}"):
        tkq.ssd_step(**space() | changed)


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "state"])
def test_no_gradient(name):
    given = make()
    given[name].requires_grad_()
    with pytest.raises(NotImplementedError, match=f"gated_delta_rule_step: {name} requires a gradient"):
        tkq.gated_delta_rule_step(**given)
    with torch.no_grad():
        tkq.gated_delta_rule_step(**given)


def test_layouts():
    """Which pools 16 bytes are taken of at once."""
    dense = torch.zeros(5, 4, 32, 48)
    for v_first, first, second in ((False, "v", "k"), (True, "k", "v")):
        assert layout_of(dense, v_first) == first and layout_of(dense.mT, v_first) == second
        assert layout_of(torch.zeros(5, 9, 32, 48)[1::2, 2:6], v_first) == first
        assert layout_of(torch.zeros(5, 4, 32, 50)[..., :48], v_first) == "any"
        assert layout_of(torch.zeros(5 * 4 * 32 * 48 + 1)[1:].view(5, 4, 32, 48), v_first) == "any"
        assert layout_of(torch.zeros(5, 4 * 32 * 48 + 2)[:, :-2].unflatten(1, (4, 32, 48)), v_first) == "any"
        assert layout_of(torch.zeros(5, 4, 32 * 48 + 2)[..., :-2].unflatten(2, (32, 48)), v_first) == "any"


def spread(given, N):
    """The same call for N sequences, which are one."""
    apart = {"state", "A", "D", "dt_bias"}
    return {name: x if name in apart or not isinstance(x, torch.Tensor) else x[:1].expand(N, *x.shape[1:])
            for name, x in given.items()}


@pytest.mark.parametrize("N", [3, 600])
def test_kernels_of_calls_are_those_that_are_shipped(N):
    """Of few states, and of many where they have kernels of their own."""
    shipped_names = {kernel.name for kernel in shipped()}
    recipes = {kernel.recipe for kernel in shipped()
               if (N > 3 and f"{kernel.name}-many" not in shipped_names) or (N == 3 and "-many" not in kernel.name)}
    with fake_gpu.launches() as seen:
        for index in (torch.int32, torch.int64):
            for state in (torch.float32, BF16):
                one, several = (make(128, 128, T=T) for T in (1, 2))
                for given in (one, several):
                    given.update(state=given["state"].to(state), state_indices=given["state_indices"].to(index))
                one, several = spread(one, N), spread(several, N)
                for g in (one["g"], torch.zeros(4)):
                    tkq.linear_attn_step(**without_beta(one) | dict(g=g))
                for g in (one["g"], torch.zeros(1, 1, 4, 128).expand(N, 1, 4, 128)):
                    call = one | dict(g=g, use_qk_l2norm_in_kernel=True)
                    tkq.gated_delta_rule_step(**call)
                    tkq.gated_delta_rule_step(**call, state_v_first=True)
                tkq.gated_delta_rule_step(**several | dict(
                    state_indices=torch.zeros(N, 2, dtype=index), num_accepted_tokens=torch.ones(N, dtype=index),
                    use_qk_l2norm_in_kernel=True))
                given = spread(space(128, 64), N)
                tkq.ssd_step(**given | dict(
                    state=given["state"].to(state), dt=given["dt"].to(BF16)[..., None].expand(N, 4, 64),
                    A=given["A"][:, None, None].expand(4, 64, 128), D=given["D"][:, None].expand(4, 64),
                    dt_bias=torch.rand(4)[:, None].expand(4, 64), dt_softplus=True,
                    state_batch_indices=given["state_batch_indices"].to(index)))
    assert {recipe for recipe, _ in seen} == recipes


@pytest.mark.parametrize("several, warps", [(False, [1, 1]), (True, [1, 4])])
def test_warps_of_few_sequences_are_blocks(several, warps):
    """Of many, several slices are a block, or several warps one slice."""
    with fake_gpu.launches() as seen:
        for N in (1, 200):
            given = spread(make(128, 128, N=1, T=1 + several), N)
            tkq.gated_delta_rule_step(**given | dict(state=zeros(5, 4, 128, 128)))
    assert [arguments[3] for _, arguments in seen] == warps
    configs = [recipe.args[1] for recipe, _ in seen]
    assert [c.k_warps for c in configs] == ([1, 1] if several else [1, 4])
