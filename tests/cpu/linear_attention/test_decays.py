"""Decays of each column from what a layer's projection gives, where no GPU is needed: the kernels' own code on the CPU
against float64, machine code, what a spec refuses."""
import pytest
import torch
import torch.nn.functional as F

from tests.helpers.emulation.finish import ColumnDecaysOnCpu, function
from tkq.linear_attention.decays import kernel, launch
from tkq.linear_attention.decays.catalog import shipped
from tkq.linear_attention.decays.spec import DecaySpec
from tkq.testing import sass

HARD = 50.0, -50.0, 0.0, -15.0, 15.0, -85.0, 88.0, 1e-6


def exact(g, A_log, bias, bound):
    x = (g.double() + bias.double()).unflatten(1, (len(A_log), -1))
    factor = A_log.double().exp()[:, None]
    y = -factor * F.softplus(x, threshold=1e9) if bound is None else bound * (factor * x).sigmoid()
    return y.flatten(1)


@pytest.mark.parametrize("tokens, bound", [(37, None), (70, -5.0)])
def test_decays_and_gradients(monkeypatch, tokens, bound):
    """Of float32: of 16 bits the DSL compiles nothing for a CPU here."""
    torch.manual_seed(0)
    heads, K = 3, 32
    g, A_log, bias = 3 * torch.randn(tokens, heads * K), torch.rand(heads), torch.randn(heads * K)
    g[0, :len(HARD)], bias[:len(HARD)] = torch.tensor(HARD), 0
    leaves = [x.double().requires_grad_() for x in (g, A_log, bias)]
    want, y = exact(*leaves, bound), torch.full((tokens, heads * K), torch.nan)
    of = ColumnDecaysOnCpu(DecaySpec("fp32", K, bound is not None))
    function(of, monkeypatch)(g, (A_log, bias, y, None, None), bound or 0.0)
    room = 2e-6 if bound is None else 2e-5  # of sigmoid what rounding its argument makes of it
    assert ((y.double() - want).abs() <= room * want.abs() + 1e-36).all()
    dy, dg = torch.randn(tokens, heads * K), torch.full_like(g, torch.nan)
    sums = torch.full((-(-tokens // launch.LONG), 2, heads * K), torch.nan)
    of = ColumnDecaysOnCpu(DecaySpec("fp32", K, bound is not None, True))
    function(of, monkeypatch)(g, (A_log, bias, dy, dg, sums), bound or 0.0)
    of_g, of_A, of_bias = torch.autograd.grad(want, leaves, dy.double())
    for found, exactly, room in (
            (dg, of_g, 4e-6), (sums[:, 0].sum(0), of_bias, 4e-6),
            (sums[:, 1].sum(0).view(heads, K).sum(1), of_A, 4e-6)):
        torch.testing.assert_close(found.double(), exactly, rtol=room, atol=room * exactly.abs().max().item())


def test_blocks_of_the_launch_are_the_kernel_s():
    assert launch.LONG == kernel.LONG and kernel.LONG % kernel.AHEAD == kernel.TOKENS % kernel.AHEAD == 0


@pytest.mark.parametrize("change", [lambda x: x, lambda x: x.transpose(2, 3), lambda x: x[..., ::2],
                                    lambda x: x.flatten()[1:-32 * 4 * 2 + 1].view(2, 8, 4, 32),
                                    lambda x: x[:, :, :2], lambda x: x[:, ::2]])
def test_rows_are_what_the_kernel_reads(change):
    x = change(torch.randn(2, 9, 4, 32).bfloat16())
    rows = launch.rows_of(x)
    assert torch.equal(rows, x.reshape(rows.shape)) and rows.stride(1) == 1
    assert rows.stride(0) % 8 == 0 and rows.data_ptr() % 16 == 0


@pytest.mark.parametrize("kernel", shipped()[::3], ids=lambda kernel: kernel.name)
@pytest.mark.machine_code(recipe=lambda kernel: kernel.recipe)
def test_shipped(kernel, machine_code):
    sass.assert_sass(machine_code, kernel.expectation)


@pytest.mark.parametrize("given", [dict(dtype="fp64"), dict(head_dim=20)])
def test_what_a_spec_refuses(given):
    with pytest.raises(ValueError, match=f"DecaySpec: {next(iter(given))} is"):
        DecaySpec(**dict(dtype="bf16", head_dim=64) | given)
