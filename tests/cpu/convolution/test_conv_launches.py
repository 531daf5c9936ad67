"""What a causal convolution gives to kernels, where no GPU is needed: tensors as it reads them, and room for what it
writes."""
import pytest
import torch

import tkq
from tests.helpers.emulation import fake_gpu
from tkq.convolution import launch, ops
from tkq.convolution.launch import Given
from tkq.convolution.plan import SHORTEST, run_tokens
from tkq.convolution.states import initial_gradient
from tkq.reference import convolution as reference

BF16 = torch.bfloat16


def lying(time, *sizes):
    """Random numbers (B, S, C) with neighbouring tokens, or channels, neighbours in memory."""
    return torch.randn(sizes[0], sizes[2], sizes[1]).mT if time else torch.randn(sizes)


def launched(call):
    """(recipe, arguments) of the first launch."""
    with fake_gpu.launches() as seen:
        call()
    return seen[0]


@pytest.mark.parametrize("time", [False, True])
def test_gradients_lie_as_x_does(time):
    x, dy = lying(time, 2, 40, 24), lying(not time, 2, 40, 24)
    _, (mine, operands, _) = launched(lambda: launch.backward(Given(x, torch.zeros(24, 4)), dy, True, True))
    found = operands[3 if time else 4]
    assert mine is x and found.stride(1 if time else 2) == 1 and torch.equal(found, dy)


@pytest.mark.parametrize("time", [False, True])
@pytest.mark.parametrize("name", ["x", "dy"])
def test_accesses_are_no_wider_than_all_tensors_allow(time, name):
    """Of one that begins one element later."""
    given = dict(x=torch.zeros(2, 32, 32), dy=torch.zeros(2, 32, 32))
    given[name] = torch.zeros(2 * 32 * 32 + 1)[1:].view(2, 32, 32)
    x, dy = (t.mT if time else t for t in given.values())
    recipe, _ = launched(lambda: launch.backward(Given(x, torch.zeros(32, 4)), dy, True, False))
    assert recipe.args[0].vector == 1


def test_tokens_that_lie_too_far_apart_are_copied(monkeypatch):
    x = torch.randn(2, 3, 16)[..., :8]
    assert launch.readable(x, False) is x
    monkeypatch.setattr(launch, "FARTHEST", 63)
    assert launch.readable(x, False).is_contiguous()


@pytest.mark.parametrize("name", ["x", "dy"])
def test_normed_heads_have_whole_accesses(name):
    """Of tensors that allow less there are copies."""
    given = dict(x=torch.randn(2, 9, 129).to(BF16)[..., 1:], dy=torch.randn(2, 9, 128).to(BF16))
    if name == "dy":
        given = dict(zip(given, reversed(given.values())))
    call = Given(given["x"], torch.zeros(128, 4), heads=1, head=128)
    recipe, (x, (_, _, _, _, dy, *_), _) = launched(lambda: launch.backward(call, given["dy"], True, True))
    assert recipe.args[0].vector == 4 and x.is_contiguous() and dy.is_contiguous()
    assert torch.equal(x, given["x"]) and torch.equal(dy, given["dy"])


@pytest.mark.parametrize("C, heads, vector", [(128, 2, 4), (128, 1, 4), (192, 3, 2), (256, 3, 4)])
def test_heads_of_half_a_warp(C, heads, vector):
    """Where the other half has channels, too."""
    assert launch.vector_of_heads(torch.zeros(1, 1, C, dtype=BF16), heads, 64) == vector


def test_along_time():
    x = torch.zeros(2, 24, 40).mT
    assert launch.along_time(x, None, None) and not launch.along_time(x, None, None, 1)
    assert not launch.along_time(x[:, :1], None, None) and not launch.along_time(x.contiguous(), None, None)
    assert not launch.along_time(x, torch.zeros(2, 24, 3), None) and not launch.along_time(x, None, torch.zeros(3))


def test_small_tensors_are_contiguous_and_at_16_bytes():
    weight, bias, cu = torch.randn(97)[1:].view(24, 4), torch.randn(25)[1:], torch.tensor([0, 9, 5, 9, 40])[::2]
    _, (_, operands, _) = launched(lambda: launch.forward(Given(torch.zeros(1, 40, 24), weight, bias, cu=cu)))
    for x, of in zip((*operands[:2], operands[3]), (weight, bias, cu)):
        assert x.is_contiguous() and x.data_ptr() % 16 == 0 and torch.equal(x, of)


@pytest.mark.parametrize("tokens", [1, 31, 33, 4100])
@pytest.mark.parametrize("time", [False, True])
def test_each_run_has_room_for_its_sums(tokens, time):
    given = Given(lying(time, 2, tokens, 24), torch.zeros(24, 4))
    _, (_, operands, run) = launched(lambda: launch.backward(given, given.x, True, True))
    parts = operands[5 if launch.along_time(given.x, None, None) else 6]
    assert (parts.shape[1] - 1) * run < tokens <= parts.shape[1] * run


def test_no_run_is_short():
    """Where channels are few, and each of a run's first tokens costs others."""
    with fake_gpu.launches() as seen:
        launch.forward(Given(torch.zeros(1, 4096, 32), torch.zeros(32, 4)))
        launch.backward(Given(torch.zeros(1, 4096, 32), torch.zeros(32, 4)), torch.zeros(1, 4096, 32), True, False)
    for (recipe, (_, _, run)), backward in zip(seen, (False, True)):
        assert run == SHORTEST[backward] == run_tokens(recipe.args[0], 1, 4096, 32, 1 << 20)


@pytest.mark.parametrize("L, columns", [(3, 3), (8, 8), (9, 0)])
def test_a_step_has_short_rows_in_registers(L, columns):
    recipe, _ = launched(lambda: tkq.causal_conv1d_step(
        torch.zeros(2, 24), torch.zeros(2, 24, L), torch.zeros(24, 4)))
    assert recipe.args[0].columns == columns


@pytest.mark.parametrize("x", [torch.zeros(2, 0, 24), torch.zeros(0, 9, 24)])
def test_no_token_has_no_gradient(x):
    weight, bias = torch.randn(24, 4), torch.randn(24)
    with fake_gpu.launches() as seen:
        dx, *others = launch.backward(Given(x, weight, bias), x, True, True)
    assert not seen and dx.shape == x.shape and not any(g.any() for g in others)


def test_gradients_are_as_the_meta_device_says():
    """States of another type, too."""
    x, weight, state = torch.zeros(2, 9, 24).to(BF16), torch.zeros(24, 4), torch.zeros(2, 24, 3).to(BF16)
    given = x, state.float(), x, weight, weight[:, 0].to(BF16), "silu", state, None, 0, 128, True, True, True
    with fake_gpu.launches():
        found = ops._backward_cuda(*given)
    assert [(g.shape, g.dtype) for g in found] == [(g.shape, g.dtype) for g in ops._backward_fake(*given)]


@pytest.mark.parametrize("wanted", ["x", "weight", "bias", "initial_state"])
@pytest.mark.parametrize("used", ["y", "state"])
def test_one_gradient_alone(wanted, used):
    """Is what it is beside the others."""
    torch.manual_seed(0)
    sizes = dict(x=(2, 9, 8), weight=(8, 4), bias=(8,), initial_state=(2, 8, 3))
    given = {name: torch.randn(size) for name, size in sizes.items()}
    alone, together = [], []
    for names, to in (((wanted,), alone), (tuple(given), together)):
        leaves = {name: x.detach().requires_grad_(name in names) for name, x in given.items()}
        found = tkq.causal_conv1d(**leaves, activation="silu", output_final_state=True)[used == "state"]
        if found.requires_grad:
            to += torch.autograd.grad(found.square().sum(), leaves[wanted], allow_unused=True)
    for one, other in zip(alone, together):
        assert (one is None and other is None) or torch.equal(one, other)


@pytest.mark.parametrize("silu", [False, True])
def test_the_initial_states_gradient_behind_normed_heads(silu):
    torch.manual_seed(0)
    x, weight, state, dy = (torch.randn(s) for s in ((2, 2, 12), (12, 4), (2, 12, 3), (2, 2, 12)))
    found = initial_gradient(dy, Given(x, weight, None, silu, state, None, 2, 4))
    given = x, weight, None, "silu" if silu else None, state, None, 2, 4
    *_, wanted = reference.causal_conv1d_backward(dy, None, *given)
    torch.testing.assert_close(found, wanted)
