"""tkq.integrations.fla: fla's names and order of arguments, against float64 on the CPU; what is refused, by name."""
import inspect
import math

import numpy
import pytest
import torch

import tkq
import tkq.integrations.fla as tkq_fla
from tests.helpers import fla_calls

BF16 = torch.bfloat16
EACH = pytest.mark.parametrize("name", fla_calls.SIGNATURES)


def test_all_functions_are_here():
    assert set(tkq_fla.__all__) == fla_calls.SIGNATURES.keys() | fla_calls.ALIASES.keys() | fla_calls.BASED
    assert all(getattr(tkq_fla, other) is getattr(tkq_fla, name) for other, name in fla_calls.ALIASES.items())
    assert tkq.integrations.fla is tkq_fla


@EACH
def test_arguments(name):
    found = inspect.signature(getattr(tkq_fla, name)).parameters.values()
    assert tuple(p.name for p in found if p.kind is p.POSITIONAL_OR_KEYWORD) == fla_calls.SIGNATURES[name]
    assert tuple(p.name for p in found if p.kind is p.KEYWORD_ONLY) == fla_calls.BY_NAME.get(name, ())


@EACH
@pytest.mark.parametrize("positions", [True, False])
def test_results(name, positions):
    given = fla_calls.inputs(name)
    o, state = fla_calls.call(name, given, positions)
    want, last = fla_calls.exact(name, given)
    assert o.dtype == BF16
    torch.testing.assert_close(o.double(), want, rtol=2**-5, atol=2**-6)
    if "initial_state" not in given:
        assert state is None
        return
    (state, last) = ((x if isinstance(x, tuple) else (x,)) for x in (state, last))
    for a, b in zip(state, last):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), b, rtol=2**-5, atol=2**-6)


@EACH
def test_without_a_final_state(name):
    given = fla_calls.inputs(name)
    o, state = fla_calls.call(name, given | dict.fromkeys(given.keys() & {"output_final_state"}, False))
    assert state is None and torch.equal(o, fla_calls.call(name, given)[0])


@EACH
def test_defaults(name):
    """q, k, v and what has no default, alone: the scale is 1 / sqrt(K)."""
    function = getattr(tkq_fla, name)
    needed = {p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty}
    given = {n: x for n, x in fla_calls.inputs(name).items() if n in needed}
    if "g" in given:
        given["g"] = -given["g"].abs()
    if fla_calls.L2 in fla_calls.SIGNATURES[name]:
        given["k"], given["beta"] = given["k"] / 8, given["beta"].sigmoid() if "beta" in given else None
    o, state = function(**{n: x for n, x in given.items() if x is not None})
    plain = dict(given, scale=32**-0.5, initial_state=torch.zeros(2, given["v"].shape[2], 32, 48))
    if name.startswith(("chunk_linear", "fused_chunk_linear")):
        plain |= dict(normalize=True, initial_state=(plain["initial_state"], torch.zeros(2, 1, 2, 32)))
    if fla_calls.L2 in fla_calls.SIGNATURES[name] and plain["beta"] is None:
        plain["beta"] = torch.ones(given["v"].shape[:3])
    torch.testing.assert_close(o.double(), fla_calls.exact(name, plain)[0], rtol=2**-5, atol=2**-6)
    assert state is None


@EACH
def test_gradients(name):
    given = fla_calls.inputs(name)
    leaves = {n: x.detach().requires_grad_() for n, x in given.items() if isinstance(x, torch.Tensor)}
    wide = {n: x.detach().double().requires_grad_() for n, x in leaves.items()}
    found, want = fla_calls.call(name, given | leaves)[0], fla_calls.exact(name, given | wide)[0]
    do = torch.randn_like(found)
    mine = torch.autograd.grad(found, list(leaves.values()), do)
    right = torch.autograd.grad(want, list(wide.values()), do.double())
    for n, a, b in zip(leaves, mine, right):
        assert a.dtype == leaves[n].dtype and (a.double() - b).norm() < 0.03 * b.norm(), n


@pytest.mark.parametrize("name, argument", [(name, argument) for name, names in fla_calls.SIGNATURES.items()
                                            for argument in fla_calls.REFUSED if argument in names
                                            and (name, argument) != ("fused_recurrent_gla", "gk")])
def test_what_tkq_has_not_is_refused(name, argument):
    function, op = getattr(tkq_fla, name), "gated_delta_rule" if "beta" in fla_calls.SIGNATURES[name] else "linear_attn"
    given = fla_calls.inputs(name) | {argument: fla_calls.REFUSED[argument]}
    with pytest.raises(NotImplementedError, match=f"^{name}: {argument}: got .*, which tkq.{op} has not"):
        function(**given)


@EACH
def test_packed_sequences(name):
    """One behind the other, of 4, 0 and 5 tokens, each with its state: what each gets alone."""
    given = fla_calls.inputs(name)
    names = [n for n in ("q", "k", "v", "g", "gk", "beta") if n in given]
    row = given | {n: given[n][:1] for n in names}
    if "normalize" in given:
        row["normalize"], (row["initial_state"], _) = False, row["initial_state"]
    if "initial_state" not in row:
        found, _ = fla_calls.call(name, row | dict(cu_seqlens=torch.tensor([0, 4, 4, 9])))
        for at in (slice(0, 4), slice(4, 9)):
            o, _ = fla_calls.call(name, row | {n: row[n][:, at] for n in names})
            torch.testing.assert_close(found[:, at], o, rtol=2**-7, atol=1e-5)
        return
    pool = torch.cat((row["initial_state"], row["initial_state"][:1]))
    found, states = fla_calls.call(name, row | dict(cu_seqlens=torch.tensor([0, 4, 4, 9]), initial_state=pool))
    for i, at in ((0, slice(0, 4)), (2, slice(4, 9))):
        alone = row | {n: row[n][:, at] for n in names} | dict(initial_state=pool[i:i + 1])
        o, state = fla_calls.call(name, alone)
        torch.testing.assert_close((found[:, at], states[i:i + 1]), (o, state), rtol=2**-7, atol=1e-5)
    assert torch.equal(states[1], pool[1])


@pytest.mark.parametrize("name", [name for name, names in fla_calls.SIGNATURES.items() if "state_v_first" in names])
def test_states_of_the_other_order(name):
    given = fla_calls.inputs(name)
    o, state = fla_calls.call(name, given)
    turned = given | dict(initial_state=given["initial_state"].mT, state_v_first=True)
    found, last = fla_calls.call(name, turned)
    assert torch.equal(found, o) and torch.equal(last, state.mT)


def test_what_is_opened_goes_on(monkeypatch):
    """What a table's line opens reaches tkq's function under its name; what it does not, stays refused."""
    seen = []
    monkeypatch.setattr(tkq_fla, "PASSED_ON", {"linear_attn": frozenset({"cu_seqlens"})})
    monkeypatch.setattr(tkq_fla, "linear_attn", lambda *given, **options: seen.append(options))
    q = torch.zeros(1, 9, 2, 32, dtype=BF16)
    cu = torch.tensor([0, 9])
    tkq_fla.chunk_simple_gla(q, q, q, cu_seqlens=cu, chunk_size=32, cu_seqlens_cpu=cu)
    assert seen == [dict(cu_seqlens=cu)]
    with pytest.raises(NotImplementedError, match="state_v_first"):
        tkq_fla.chunk_simple_gla(q, q, q, state_v_first=True)


@pytest.mark.parametrize("name, changed, error, words", [
    ("chunk_simple_gla", dict(g_gamma=torch.zeros(4)), NotImplementedError, "g_gamma: got a tensor with g"),
    ("chunk_kda", dict(use_gate_in_kernel=1), TypeError, "use_gate_in_kernel: got 1"),
    ("chunk_kda", dict(use_gate_in_kernel=False), ValueError, "A_log: got a tensor, allowed with use_gate"),
    ("chunk_kda", dict(A_log=None), ValueError, "A_log: got None, expected a tensor with use_gate_in_kernel=True"),
    ("fused_recurrent_kda", dict(dt_bias=torch.zeros(4)), ValueError, "dt_bias: has 4 numbers, expected 128"),
    ("fused_recurrent_kda", dict(A_log=[1.0]), TypeError, "A_log: got list"),
    ("fused_recurrent_kda", dict(lower_bound="low"), TypeError, "lower_bound: got str"),
    ("fused_recurrent_gla", dict(gk=torch.zeros(2, 9, 4)), ValueError, "gk: has 3 dimensions"),
    ("chunk_gated_delta_rule", dict(use_beta_sigmoid_in_kernel=False), ValueError, "allow_neg_eigval: got True"),
    ("chunk_gated_delta_rule", dict(use_beta_sigmoid_in_kernel=1), TypeError, "use_beta_sigmoid_in_kernel: got 1"),
    ("chunk_gated_delta_rule", dict(beta=[1.0]), TypeError, "beta: got list"),
    ("chunk_gated_delta_rule", dict(A_log=None), ValueError, "A_log: got None"),
    ("chunk_linear_attn", dict(normalize=None), TypeError, "normalize: got None"),
    ("chunk_linear_attn", dict(cu_seqlens=torch.zeros(2)), NotImplementedError, "cu_seqlens: got a Tensor with norm"),
    ("chunk_lightning_attn", dict(num_layers=0), ValueError, "num_layers: got 0, allowed are integers from 1 to"),
    ("chunk_lightning_attn", dict(num_layers=10**400), ValueError, "num_layers: got 1000"),
    *(("fused_recurrent_lightning_attn", dict(layer_idx=wrong), ValueError, "layer_idx: got .*, allowed are finite")
      for wrong in (math.nan, math.inf, 10**400)),
    ("fused_recurrent_delta_rule", dict(v=None, beta=None), TypeError, "v: got NoneType"),
    ("fused_recurrent_gated_delta_rule", dict(v=None, beta=None), TypeError, "v: got NoneType"),
    ("chunk_delta_rule", dict(beta=None), TypeError, "beta: got NoneType"),
    ("chunk_gated_delta_rule", dict(beta=None, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False), TypeError,
     "beta: got NoneType"),
    ("chunk_kda", dict(beta=None), TypeError, "beta: got NoneType"),
    *(("chunk_gated_delta_rule", dict(beta=torch.ones(2, 9, 4, dtype=wrong)), TypeError, f"beta: dtype is {wrong}")
      for wrong in (torch.int32, torch.complex64, torch.float64)),
    *(("chunk_kda", dict(lower_bound=wrong), ValueError, "lower_bound: got .*, allowed are")
      for wrong in (5.0, 0, math.nan, -math.inf, -10**400)),
    *(("chunk_kda", dict(A_log=torch.ones(4, dtype=wrong)), TypeError, f"A_log: dtype is {wrong}")
      for wrong in (torch.int32, torch.complex64)),
    ("fused_recurrent_kda", dict(g=torch.ones(2, 9, 4, 32, dtype=torch.int32)), TypeError, "g: dtype is torch.int32"),
    ("fused_recurrent_kda", dict(dt_bias=torch.ones(128).bool()), TypeError, "dt_bias: dtype is torch.bool"),
    ("chunk_linear_attn", dict(initial_state=(None,)), ValueError, "initial_state: got a tuple of 1"),
    ("chunk_linear_attn", dict(initial_state=(None,) * 3), ValueError, "initial_state: got a tuple of 3, allowed are"),
    ("chunk_linear_attn", dict(initial_state=(None, 1.0)), TypeError, r"initial_state\[1\]: got float"),
    ("chunk_linear_attn", dict(initial_state=(None, torch.ones(2, 1, 2, 32).int())), TypeError,
     r"initial_state\[1\]: dtype is torch.int32"),
    ("chunk_linear_attn", dict(initial_state=(None, torch.zeros(2, 2, 32))), ValueError,
     r"initial_state\[1\]: shape is \(2, 2, 32\), expected \(2, 1, 2, 32\)"),
    ("chunk_lightning_attn", dict(layer_idx="1"), TypeError, "layer_idx: got str"),
    ("chunk_retention", dict(q=None), TypeError, "q: got NoneType"),
])
def test_what_is_refused(name, changed, error, words):
    with pytest.raises(error, match=f": {words}"):
        getattr(tkq_fla, name)(**fla_calls.inputs(name) | changed)


@pytest.mark.parametrize("name, argument", [("chunk_kda", "A_log"), ("fused_recurrent_kda", "dt_bias")])
def test_gates_of_two_devices_are_refused(name, argument):
    given = fla_calls.inputs(name)
    with pytest.raises(ValueError, match=f"{argument}: is on meta, but g is on cpu"):
        getattr(tkq_fla, name)(**given | {argument: given[argument].to("meta")})


def test_numbers_of_numpy():
    given = fla_calls.inputs("chunk_lightning_attn")
    again = given | {name: numpy.int64(given[name]) for name in ("layer_idx", "num_layers")}
    assert torch.equal(*(tkq_fla.chunk_lightning_attn(**x)[0] for x in (given, again)))
    given = fla_calls.inputs("chunk_kda")
    found = [fla_calls.call("chunk_kda", given | dict(lower_bound=x))[0] for x in (-2.0, numpy.float32(-2.0))]
    assert torch.equal(*found)


def test_a_head_first_layout_is_no_argument():
    with pytest.raises(TypeError, match="head_first"):
        tkq_fla.chunk_retention(**fla_calls.inputs("chunk_retention"), head_first=True)


def test_sums_of_no_tokens():
    q = torch.zeros(2, 0, 2, 32, dtype=BF16)
    o, (state, z) = tkq_fla.chunk_linear_attn(q, q, q, output_final_state=True)
    assert o.shape == q.shape and not state.any() and z.shape == (2, 1, 2, 32) and not z.any()
    initial = torch.randn(2, 2, 32, 32), torch.randn(2, 1, 2, 32)
    _, last = tkq_fla.chunk_linear_attn(q, q, q, initial_state=initial, output_final_state=True)
    assert all(map(torch.equal, last, initial))


def test_a_state_alone_begins_with_no_sum():
    given = fla_calls.inputs("chunk_linear_attn")
    state, z = given.pop("initial_state")
    o, _ = tkq_fla.chunk_linear_attn(**given, initial_state=state)
    assert torch.equal(o, tkq_fla.chunk_linear_attn(**given, initial_state=(state, torch.zeros_like(z)))[0])


@pytest.mark.parametrize("name", ["chunk_gla", "chunk_kda", "chunk_simple_gla", "chunk_gated_delta_rule"])
def test_gates_of_another_rank_are_refused(name):
    q, k, v = torch.randn(3, 1, 8, 2, 32).bfloat16()
    g = -torch.rand(1, 8, 2, *((32,) if name in ("chunk_simple_gla", "chunk_gated_delta_rule") else ()))
    beta = (torch.rand(1, 8, 2),) if name in ("chunk_kda", "chunk_gated_delta_rule") else ()
    with pytest.raises(ValueError, match=f"{name}: g: has {g.dim()} dimensions"):
        getattr(tkq_fla, name)(q, k, v, g, *beta)


@pytest.mark.parametrize("name", ["chunk_kda", "fused_recurrent_kda"])
@pytest.mark.parametrize("A_log", [True, False])
def test_gates_with_a_bound(name, A_log):
    """Of fla's layers with safe_gate; without A_log it counts as 0."""
    given = fla_calls.inputs(name) | dict(lower_bound=-2.0)
    if not A_log:
        given["A_log"] = torch.zeros(4)
    want, _ = fla_calls.exact(name, given)
    o, _ = fla_calls.call(name, given | ({} if A_log else dict(A_log=None)))
    torch.testing.assert_close(o.double(), want, rtol=2**-5, atol=2**-6)
    assert (fla_calls.exact(name, given | dict(lower_bound=None))[0] - want).norm() > 0.2 * want.norm()


@pytest.mark.parametrize("name", sorted(fla_calls.BASED))
def test_based(name):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 9, 3, cols).bfloat16() for cols in (16, 16, 48))
    f = getattr(tkq_fla, name)
    assert tuple(inspect.signature(f).parameters) == ("q", "k", "v", "scale", "use_norm", "head_first")
    o = f(q, k, v, 0.5, False)
    assert torch.equal(o, tkq.based(q, k, v, 0.5, False)) and not torch.equal(o, f(q, k, v))
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    assert torch.equal(f(*heads_first, 0.5, False, True).transpose(1, 2), o)
    with pytest.raises(TypeError, match="head_first"):
        f(q, k, v, head_first=1)
    for wrong, error, words in ((None, TypeError, "got NoneType"), (k[0], ValueError, "has 3 dimensions")):
        with pytest.raises(error, match=f"parallel_based: k: {words}"):
            f(q, wrong, v, head_first=True)


@pytest.mark.parametrize("call", [
    lambda q, v: tkq_fla.chunk_retention(q, q, v), lambda q, v: tkq_fla.chunk_lightning_attn(q, q, v, 0, 2)])
def test_decays_of_heads_want_as_many_of_values(call):
    q = torch.randn(1, 8, 1, 32).bfloat16()
    with pytest.raises(ValueError, match="v: has 2 heads, expected 1, as q"):
        call(q, torch.randn(1, 8, 2, 32).bfloat16())


def test_heads_that_share_a_key_are_divided_by_its_sum():
    torch.manual_seed(0)
    q, k, v = (torch.rand(1, 5, heads, 32).bfloat16() for heads in (2, 2, 4))
    found, _ = tkq_fla.chunk_linear_attn(q, k, v)
    for head in range(4):
        one = [x[:, :, [n]] for x, n in ((q, head // 2), (k, head // 2), (v, head))]
        torch.testing.assert_close(found[:, :, [head]], tkq_fla.chunk_linear_attn(*one)[0])
