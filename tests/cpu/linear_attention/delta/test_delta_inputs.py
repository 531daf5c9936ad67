"""The options of tkq.gated_delta_rule that prepare q, k, g and beta: results, gradients, what is refused."""
import contextlib

import pytest
import torch
import torch.nn.functional as F

import tkq
from tests.helpers import delta_layers
from tests.helpers.emulation import fake_gpu
from tests.helpers.ops import every_op_checks as checks
from tests.helpers.ops import every_op_sharded as sharded
from tests.helpers.ops.every_op import Maker
from tests.helpers.torch_versions import since
from tkq.reference.linear_attention import linear_attn as recurrence

BF16 = torch.bfloat16


def make(S=9, dtype=BF16, gates=BF16):
    given = delta_layers.tensors(Maker("cpu", S, 0, dtype), 32, 48)
    return given | {name: given[name].to(gates) for name in ("g", "A_log", "dt_bias")}


@pytest.mark.parametrize("gates", [BF16, torch.float16, torch.float32])
def test_results(gates):
    given = make(gates=gates)
    initial = torch.randn(2, 4, 32, 48)
    o, state = delta_layers.call(**given, scale=0.4, initial_state=initial, output_final_state=True)
    want, last = delta_layers.exact(**given, scale=0.4, initial_state=initial)
    torch.testing.assert_close(o.double(), want, rtol=2**-6, atol=2**-7)  # q and k are rounded once more
    torch.testing.assert_close(state.double(), last, rtol=2**-6, atol=2**-6)


OPTIONS = {
    "l2norm": (dict(use_qk_l2norm_in_kernel=True), lambda q, k, v, g, beta, A_log, dt_bias: (
        *(F.normalize(x.double(), dim=-1).to(BF16) for x in (q, k)), v, -g.abs(), beta)),
    "gate": (dict(use_gate_in_kernel=True), lambda q, k, v, g, beta, A_log, dt_bias: (
        q, k, v, -A_log.exp() * F.softplus(g + dt_bias), beta)),
    "negative eigenvalues": (dict(allow_neg_eigval=True), lambda q, k, v, g, beta, A_log, dt_bias: (
        q, k, v, -g.abs(), 2 * beta)),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_alone(name):
    options, prepare = OPTIONS[name]
    given = make(gates=torch.float32)
    given |= dict(q=given["q"] / 8, k=given["k"] / 8)
    want = tkq.gated_delta_rule(*prepare(**given))
    if name != "gate":
        given |= dict(g=-given["g"].abs(), A_log=None, dt_bias=None)
    found = tkq.gated_delta_rule(**given, **options)
    torch.testing.assert_close(found, want, rtol=2**-7, atol=2**-9)
    del options[next(iter(options))]
    given |= dict(A_log=None, dt_bias=None)
    if name != "gate":
        assert not torch.allclose(tkq.gated_delta_rule(**given), want, rtol=2**-4, atol=2**-5)


@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("gates", [BF16, torch.float32])
def test_gates_of_columns(bound, gates):
    """As Kimi's layer has them, with their gradients, in float64 from the first step on."""
    given = make()
    g, A_log, dt_bias = (torch.randn(*shape).to(gates) for shape in ((2, 9, 4, 32), (4,), (4, 32)))
    options = dict(A_log=A_log, dt_bias=dt_bias, use_gate_in_kernel=True, gate_lower_bound=bound)
    leaves = [x.requires_grad_() for x in (g, A_log, dt_bias)]
    q, k, v, beta = (given[name] for name in ("q", "k", "v", "beta"))
    o = tkq.gated_delta_rule(q / 8, k / 8, v, g, beta, **options)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    x = wide[0] + wide[2]
    logs = -wide[1].exp()[:, None] * F.softplus(x) if bound is None else bound * (wide[1].exp()[:, None] * x).sigmoid()
    want, _ = recurrence(*((x / 8).double() for x in (q, k)), v.double(), logs, beta=beta.double())
    torch.testing.assert_close(o.double(), want, rtol=2**-6, atol=2**-8)
    do = torch.randn_like(o)
    gradients = torch.autograd.grad(o, leaves, do), torch.autograd.grad(want, wide, do.double())
    for found, exact, of in zip(*gradients, leaves):
        assert found.dtype == of.dtype
        torch.testing.assert_close(found.double(), exact, rtol=2**-5, atol=2**-6 * exact.abs().max().item())
    if bound is not None:
        zeros = tkq.gated_delta_rule(q / 8, k / 8, v, g, beta, **options | dict(A_log=torch.zeros(4)))
        assert torch.equal(tkq.gated_delta_rule(q / 8, k / 8, v, g, beta, **options | dict(A_log=None)), zeros)


def test_no_bias_is_zeros():
    given = make()
    zeros = given | dict(dt_bias=torch.zeros(4))
    assert torch.equal(delta_layers.call(**given | dict(dt_bias=None)), delta_layers.call(**zeros))


def test_vectors_of_zeros_stay_zeros():
    """Padding: no division by zero, and no gradient that is not finite."""
    given = make()
    for name in ("q", "k"):
        given[name][:, 3] = 0
        given[name].requires_grad_()
    o = delta_layers.call(**given)
    o.float().sum().backward()
    assert not o[:, 3].any() and given["q"].grad.isfinite().all() and given["k"].grad.isfinite().all()


def test_with_the_norm_strides_are_free():
    """What TMA could not read is read by the norm."""
    given = make()
    odd = given | {name: F.pad(given[name], (1, 0))[..., 1:] for name in ("q", "k")}
    assert torch.equal(delta_layers.call(**odd), delta_layers.call(**given))


def test_no_tokens():
    assert delta_layers.call(**make(S=0)).shape == (2, 0, 4, 48)


def test_gradients():
    given = make(gates=torch.float32)
    wide = {name: x.detach().double().requires_grad_() for name, x in given.items()}
    for x in given.values():
        x.requires_grad_()
    found, want = delta_layers.call(**given), delta_layers.exact(**wide)[0]
    do = torch.randn_like(found)
    mine = torch.autograd.grad(found, list(given.values()), do)
    exact = torch.autograd.grad(want, list(wide.values()), do.double())
    for name, a, b in zip(given, mine, exact):
        assert a.dtype == given[name].dtype
        assert (a.double() - b).norm() < 0.02 * b.norm(), name  # q and k are rounded once more


def test_packed_sequences_and_a_pool():
    """The options come ahead of what says where sequences and states lie."""
    given = make(9)
    row = {name: x[:1] if x.dim() > 1 else x for name, x in given.items()}
    initial, pool = torch.randn(2, 4, 32, 48), torch.zeros(5, 4, 32, 48)
    pool[[3, 1]] = initial
    cu, rows = torch.tensor([0, 4, 9]), torch.tensor([3, 1])
    o, states = delta_layers.call(**row, initial_state=initial, output_final_state=True, cu_seqlens=cu)
    with torch.no_grad():
        found = delta_layers.call(**row, initial_state=pool, cu_seqlens=cu, state_indices=rows)
    assert torch.equal(found, o) and torch.equal(pool[rows], states)
    for i, at in enumerate((slice(0, 4), slice(4, 9))):
        alone = {name: x[:, at] if x.dim() > 1 else x for name, x in row.items()}
        want = delta_layers.call(**alone, initial_state=initial[i:i + 1])
        torch.testing.assert_close(o[:, at], want, rtol=2**-7, atol=2**-9)


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize("changed, error, words", [
    (dict(A_log=None), ValueError, "A_log: got None, expected a tensor with use_gate_in_kernel=True"),
    (dict(g=None), ValueError, "g: got None, expected a tensor with use_gate_in_kernel=True"),
    (dict(use_gate_in_kernel=False), ValueError, "A_log: got a tensor, allowed with use_gate_in_kernel=True alone"),
    (dict(use_gate_in_kernel=False, A_log=None), ValueError, "dt_bias: got a tensor, allowed with use_gate_in_kernel"),
    (dict(g=zeros(2, 9, 4, 32)), ValueError, r"dt_bias: shape is \(4,\), expected \(4, 32\)"),
    (dict(g=zeros(2, 9, 2, 32)), ValueError, r"g: shape is \(2, 9, 2, 32\), expected \(2, 9, 4, any\)"),
    (dict(gate_lower_bound=-5.0), ValueError, "gate_lower_bound: got -5.0 with a g of 3 dimensions"),
    (dict(gate_lower_bound=0.0, g=zeros(2, 9, 4, 32)), ValueError, "gate_lower_bound: got 0.0 with a g of 4"),
    (dict(gate_lower_bound="a"), TypeError, "gate_lower_bound"),
    (dict(gate_lower_bound=-5.0, use_gate_in_kernel=False, A_log=None, dt_bias=None), ValueError,
     "gate_lower_bound: got a number, allowed with use_gate_in_kernel=True alone"),
    (dict(g=zeros(2, 9, 2)), ValueError, r"g: shape is \(2, 9, 2\), expected \(2, 9, 4\)"),
    (dict(g=zeros(2, 9, 4, dtype=torch.float64)), TypeError, "g: dtype is torch.float64"),
    (dict(A_log=zeros(2)), ValueError, r"A_log: shape is \(2,\), expected \(4\)"),
    (dict(dt_bias=zeros(4, 1)), ValueError, r"dt_bias: shape is \(4, 1\), expected \(4\)"),
    (dict(dt_bias=zeros(4).to("meta")), ValueError, "dt_bias: is on meta"),
    (dict(dt_bias=zeros(4, dtype=torch.int32)), TypeError, "dt_bias"),
    (dict(use_qk_l2norm_in_kernel=1), TypeError, "use_qk_l2norm_in_kernel: got 1, allowed are True and False"),
    (dict(q=zeros(2, 9, 64, dtype=BF16)), ValueError, "q: has 3 dimensions"),
    (dict(q=zeros(2, 9, 2, 32)), TypeError, "q: .*float32"),
    (dict(k=zeros(2, 9, 2, 64, dtype=BF16)[..., ::2]), ValueError, "k: "),
    (dict(k=zeros(2, 9, 2, 48, dtype=BF16)), ValueError, r"k: shape is \(2, 9, 2, 48\)"),
    (dict(q=zeros(2, 9, 2, 272, dtype=BF16), k=zeros(2, 9, 2, 272, dtype=BF16)), NotImplementedError, "q: K is 272"),
    (dict(v=zeros(2, 9, dtype=BF16)), ValueError, "v: has 2 dimensions"),
    (dict(beta=None), TypeError, "beta"),
])
def test_what_is_refused(changed, error, words):
    with pytest.raises(error, match=f"^(gated_delta_rule: )?({words})"):
        tkq.gated_delta_rule(**make() | delta_layers.OPTIONS | changed)


@pytest.mark.parametrize("name", ["q", "k", "v", "beta"])
@pytest.mark.parametrize("where", [contextlib.nullcontext, fake_gpu.launches])
def test_no_tensor_is_named(name, where):
    """Also on a GPU, where the kernel may have the lengths and the gates, which is asked first."""
    given = make() | delta_layers.OPTIONS | dict(g=zeros(2, 9, 4, 32), dt_bias=zeros(4, 32), gate_lower_bound=-5.0)
    with where(), pytest.raises(TypeError, match=f"gated_delta_rule: {name}: got NoneType"):
        tkq.gated_delta_rule(**given | {name: None})


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("layer", [None, "GatedDeltaNet", "KimiDeltaAttention"])
def test_traced_by_jit(layer):
    """Whose sizes are tensors: eps is of the mean of squares, and so a fraction of one."""
    if layer is None:
        given = make()
        names, given = tuple(given), tuple(given.values())
        run = lambda *x: delta_layers.call(**dict(zip(names, x)))
    else:
        run = getattr(tkq.nn, layer)(48, num_heads=1, head_dim=32, dtype=BF16)
        given = torch.randn(1, 5, 48).to(BF16),
    program = torch.jit.trace(run, given, check_trace=False)
    torch.testing.assert_close(program(*given), run(*given))


def test_opcheck():
    checks.passes_opcheck(delta_layers.CASE, "cpu", checks.QUICK)


def test_compiled():
    checks.compiles_once(delta_layers.CASE, "cpu", "eager", checks.ROWS[::2])


@pytest.mark.slow
def test_compiled_through_aot_dispatcher():
    checks.compiles_once(delta_layers.CASE, "cpu")


def test_exported():
    checks.exports(delta_layers.CASE, "cpu")


def test_autocast():
    checks.keeps_its_types_under_autocast(delta_layers.CASE, "cpu")
    checks.autocasts(delta_layers.CASE, "cpu")


@since("2.10", "DTensor has no rule for softplus")
def test_on_dtensors():
    """Sharded by sequences and by heads."""
    with sharded.one_rank("cpu") as mesh:
        for dimension in (None, 0, 2):
            sharded.on_dtensors(delta_layers.CASE, mesh, "cpu", dimension)


def test_what_stands_in_tokens_of_no_sequence_reaches_no_gradient():
    """Of the options' own tensors, too: a sum over tokens."""
    q, k = torch.randn(2, 1, 8, 1, 32).bfloat16()
    given = [q, k, torch.randn(1, 8, 2, 32).bfloat16(), torch.randn(1, 8, 2), torch.rand(1, 8, 2)]
    weights = [torch.zeros(2), torch.zeros(2)]

    def gradients(tensors):
        leaves = [x.detach().clone().requires_grad_() for x in (*tensors, *weights)]
        o = tkq.gated_delta_rule(*leaves[:5], None, None, False, True, A_log=leaves[5], dt_bias=leaves[6],
                                 use_gate_in_kernel=True, cu_seqlens=torch.tensor([1, 5]))
        return torch.autograd.grad(o.float().sum(), leaves)

    spoilt = [x.clone() for x in given]
    for x in spoilt:
        x[:, 5:] = x[:, :1] = float("nan")
    for found, want in zip(gradients(spoilt), gradients(given)):
        assert torch.equal(found, want) and not found.isnan().any()


def test_packed_keys_whose_rows_overlap():
    q, memory = torch.randn(1, 8, 2, 32).bfloat16(), torch.randn(64).bfloat16()
    k = memory.as_strided(q.shape, [1] * 4)
    v, g, beta = torch.randn(1, 8, 2, 32).bfloat16(), -torch.rand(1, 8, 2), torch.rand(1, 8, 2)
    cu = torch.tensor([0, 3, 8])
    found, want = (tkq.gated_delta_rule(q, x, v, g, beta, None, None, False, True, cu_seqlens=cu)
                   for x in (k, k.contiguous()))
    assert torch.equal(found, want) and found.any()


@pytest.mark.parametrize("name", ["q", "k"])
def test_packed_tensors_of_two_devices_are_refused_by_name(name):
    given = {x: torch.randn(1, 8, 2, 32).bfloat16() for x in "qkv"}
    given[name] = given[name].to("meta")
    with pytest.raises(ValueError, match=rf"\b{name}\b.*meta"):
        tkq.gated_delta_rule(**given, g=-torch.rand(1, 8, 2), beta=torch.rand(1, 8, 2), use_qk_l2norm_in_kernel=True,
                             cu_seqlens=torch.tensor([0, 3, 8]))
