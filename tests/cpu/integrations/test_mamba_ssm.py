"""tkq.integrations.mamba_ssm: mamba_ssm's names and order of arguments, against float64 on the CPU."""
import inspect
import math

import pytest
import torch
import torch.nn.functional as F

import tkq
import tkq.integrations.mamba_ssm as tkq_mamba
from tkq.linear_attention.check import for_tma
from tkq.reference.ssd import mamba2_ssd as scan

BF16 = torch.bfloat16
SIGNATURES = {  # as mamba_ssm 2.3 has them
    "mamba_chunk_scan_combined": ("x", "dt", "A", "B", "C", "chunk_size", "D", "z", "dt_bias", "initial_states",
                                  "seq_idx", "cu_seqlens", "dt_softplus", "dt_limit", "return_final_states",
                                  "return_varlen_states"),
    "selective_state_update": ("state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias", "dt_softplus",
                               "state_batch_indices")}
DEFAULTS = {"D": None, "z": None, "dt_bias": None, "initial_states": None, "seq_idx": None, "cu_seqlens": None,
            "dt_softplus": False, "dt_limit": (0.0, math.inf), "return_final_states": False,
            "return_varlen_states": False, "state_batch_indices": None}


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments(name):
    found = inspect.signature(getattr(tkq_mamba, name)).parameters
    assert tuple(found) == SIGNATURES[name] and set(tkq_mamba.__all__) == SIGNATURES.keys()
    assert all(p.default is (p.empty if p.name not in DEFAULTS else p.default) for p in found.values())
    assert {p.name: p.default for p in found.values() if p.default is not p.empty}.items() <= DEFAULTS.items()
    assert tkq.integrations.mamba_ssm is tkq_mamba


def inputs(S=9, H=4, P=32, N=32):
    """Slices of one projection whose rows lie at odd places, as Mamba2's are."""
    torch.manual_seed(0)
    row = torch.randn(2, S, 2 * H * P + 2 * N + H + 1).to(BF16)
    z, x, B, C, dt, _ = row.split([H * P, H * P, N, N, H, 1], -1)
    x, z = (t.unflatten(-1, (H, P)) for t in (x, z))
    return dict(x=x, dt=dt, A=-torch.rand(H), B=B.unsqueeze(2), C=C.unsqueeze(2), D=torch.randn(H), z=z,
                dt_bias=torch.randn(H), initial_states=torch.randn(2, H, P, N))


def test_the_scan():
    given = inputs()
    with_all = tuple(given.values())
    want, last = scan(*(t.double() for t in with_all), True, (0.0, 1.5))
    x, dt, A, B, C, D, z, dt_bias, initial = with_all
    y, states = tkq_mamba.mamba_chunk_scan_combined(x, dt, A, B, C, 256, D, z, dt_bias, initial, None, None, True,
                                                    (0.0, 1.5), True)
    assert y.dtype == BF16 and states.dtype == torch.float32
    torch.testing.assert_close(y.double(), want, rtol=2**-5, atol=2**-6)
    torch.testing.assert_close(states.double(), last, rtol=2**-5, atol=2**-6)
    alone = tkq_mamba.mamba_chunk_scan_combined(**given, chunk_size=64, dt_softplus=True, dt_limit=(0.0, 1.5))
    assert torch.equal(alone, y)


def test_gradients_of_the_scan():
    given = {name: t.detach().clone().requires_grad_() for name, t in inputs().items()}
    wide = {name: t.detach().double().requires_grad_() for name, t in given.items()}
    y = tkq_mamba.mamba_chunk_scan_combined(**given, chunk_size=64, dt_softplus=True)
    want, _ = scan(*wide.values(), True, (0.0, math.inf))
    dy = torch.randn_like(y)
    for name, a, b in zip(given, torch.autograd.grad(y, list(given.values()), dy),
                          torch.autograd.grad(want, list(wide.values()), dy.double())):
        assert a.dtype == given[name].dtype and (a.double() - b).norm() < 0.03 * b.norm(), name


@pytest.mark.parametrize("expanded", [True, False])
@pytest.mark.parametrize("rows", [None, [3, -1]])
def test_the_update(expanded, rows):
    """Expanded as Mamba2's step expands it, in a pool."""
    given = {name: t[:, 0] if name in ("x", "dt", "B", "C", "z") else t for name, t in inputs().items()}
    pool = torch.randn(4, 4, 32, 32)
    before, (P, N) = pool.clone(), (32, 32)
    at = [0, 1] if rows is None else rows
    x, dt, A, B, C, D, z, dt_bias, _ = (t.double() for t in given.values())
    d = F.softplus(dt + dt_bias)[..., None]
    state = before[at].double() * (d * A[:, None]).exp()[..., None] + (d * x)[..., None] * B[:, :, None]
    want = ((state * C[:, :, None]).sum(-1) + D[:, None] * x) * F.silu(z)
    x, dt, A, B, C, D, z, dt_bias, _ = given.values()
    if expanded:
        dt, dt_bias, D = dt[..., None].expand(-1, -1, P), dt_bias[:, None].expand(-1, P), D[:, None].expand(-1, P)
        A = A[:, None, None].expand(-1, P, N)
    y = tkq_mamba.selective_state_update(pool, x, dt, A, B, C, D, z, dt_bias, True,
                                         None if rows is None else torch.tensor(rows, dtype=torch.int32))
    used = [i for i, row in enumerate(at) if row >= 0]
    torch.testing.assert_close(y[used].double(), want[used], rtol=2**-7, atol=2**-8)
    torch.testing.assert_close(pool[[at[i] for i in used]].double(), state[used], rtol=1e-5, atol=1e-5)
    others = [row for row in range(4) if row not in at]
    assert torch.equal(pool[others], before[others]) and (rows is None or not y[1].any())


@pytest.mark.parametrize("argument, value", [("seq_idx", torch.zeros(2, 9, dtype=torch.int32)),
                                             ("cu_seqlens", torch.tensor([0, 9])), ("return_varlen_states", True)])
def test_what_the_scan_has_not(argument, value):
    with pytest.raises(NotImplementedError, match=f"_combined: {argument}: got .*, supported is (None|False); tkq"):
        tkq_mamba.mamba_chunk_scan_combined(**inputs(), chunk_size=64, **{argument: value})


def test_what_is_refused():
    given = inputs()
    with pytest.raises(TypeError, match="mamba_chunk_scan_combined: A: got list"):
        tkq_mamba.mamba_chunk_scan_combined(**given | dict(A=[1.0]), chunk_size=64)
    for wrong in (torch.int64, torch.bool, torch.float64, torch.complex64):
        with pytest.raises(TypeError, match=f"mamba_chunk_scan_combined: A: dtype is {wrong}, allowed are"):
            tkq_mamba.mamba_chunk_scan_combined(**given | dict(A=given["A"].to(wrong)), chunk_size=64)
    for name in "xBCz":
        for wrong, says in ((given[name].to_sparse(), "a torch.sparse_coo tensor"), ([1.0], "list")):
            with pytest.raises(TypeError, match=f"mamba_chunk_scan_combined: {name}: got {says}"):
                tkq_mamba.mamba_chunk_scan_combined(**given | {name: wrong}, chunk_size=64)
    with pytest.raises(TypeError, match="mamba_chunk_scan_combined: x: got NoneType"):
        tkq_mamba.mamba_chunk_scan_combined(**given | dict(x=None), chunk_size=64)
    x = torch.zeros(2, 32, dtype=BF16)
    with pytest.raises(NotImplementedError, match=r"selective_state_update: state: has 3 dimensions \(Mamba-1\)"):
        tkq_mamba.selective_state_update(torch.zeros(2, 32, 32), x, x, torch.zeros(32, 32), x, x)
    with pytest.raises(NotImplementedError, match="ssd_step: A: strides are .*, numbers that differ within a head"):
        tkq_mamba.selective_state_update(torch.zeros(2, 1, 32, 32), x[:, None], x[:, :1], torch.randn(1, 32, 32),
                                         x[:, None], x[:, None])
    for shape in ((), (1,)):
        with pytest.raises(ValueError, match="ssd_step: x: has . dimensions"):
            tkq_mamba.selective_state_update(torch.zeros(2, 1, 32, 32), torch.zeros(shape, dtype=BF16), x, x, x, x)


@pytest.mark.parametrize("odd", [False, True])
def test_traced(odd):
    """Tracers do not say where a tensor begins, whose columns may lie anywhere in a row."""
    given = inputs()
    if not odd:
        given = {name: t.clone(memory_format=torch.contiguous_format) for name, t in given.items()}

    class Scan(torch.nn.Module):
        def forward(self, x, dt, A, B, C, D, z):
            return tkq_mamba.mamba_chunk_scan_combined(x, dt, A, B, C, 64, D, z)

    given = [given[name] for name in ("x", "dt", "A", "B", "C", "D", "z")]
    want = Scan()(*given)
    torch._dynamo.reset()
    compiled = torch.compile(Scan(), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*given), want)
    torch.testing.assert_close(torch.export.export(Scan(), tuple(given), strict=False).module()(*given), want)


def test_rows_that_fit_are_not_copied():
    for fits in (torch.zeros(3, 2, 32), torch.zeros(3, 2, 40)[:, 1:, 8:], torch.zeros(0, 5)[:, 1:], torch.zeros(4)):
        assert for_tma(fits) is fits
    for odd in (torch.zeros(3, 2, 33)[..., :32], torch.zeros(2, 33)[:1, 1:], torch.zeros(32, 2).mT):
        assert for_tma(odd).is_contiguous() and for_tma(odd) is not odd


def test_a_step_takes_b_and_c_of_one_group_without_a_dimension_for_it():
    state, x, dt = torch.randn(2, 4, 32, 32), torch.randn(2, 4, 32).bfloat16(), torch.rand(2, 4, 1).expand(2, 4, 32)
    A, (B, C) = (-torch.rand(4, 1, 1)).expand(4, 32, 32), torch.randn(2, 2, 32).bfloat16()
    states = [state.clone() for _ in range(2)]
    found = tkq_mamba.selective_state_update(states[0], x, dt, A, B, C)
    want = tkq_mamba.selective_state_update(states[1], x, dt, A, B[:, None], C[:, None])
    assert torch.equal(found, want) and torch.equal(*states)
