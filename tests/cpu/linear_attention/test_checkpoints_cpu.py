"""`checkpoint_every` on the CPU: the states of shorter calls, where the docstring says that they are; what is
refused."""
import pytest
import torch
from torch.autograd import forward_ad

import tkq

BF16, F32, EVERY = torch.bfloat16, torch.float32, 64
OPS = "linear_attn", "gated_delta_rule"


def make(op, batch=2, tokens=150, state=None):
    torch.manual_seed(0)
    q, k = (torch.nn.functional.normalize(torch.randn(batch, tokens, 1, 32), dim=-1).to(BF16) for _ in range(2))
    v, g = torch.randn(batch, tokens, 2, 48).to(BF16), -torch.rand(batch, tokens, 2)
    beta = (torch.rand(batch, tokens, 2),) * (op == "gated_delta_rule")
    return (q, k, v, g, *beta), None if state is None else torch.randn(state, 2, 32, 48)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("v_first", [False, True])
def test_of_a_batch(op, v_first):
    tensors, initial = make(op, state=2)
    call, given = getattr(tkq, op), initial.mT.contiguous() if v_first else initial
    o, state, found = call(*tensors, initial_state=given, output_final_state=True, state_v_first=v_first,
                           checkpoint_every=EVERY)
    alone, again = call(*tensors, initial_state=given, state_v_first=v_first, checkpoint_every=EVERY)
    want, last = call(*tensors, initial_state=given, output_final_state=True, state_v_first=v_first)
    torch.testing.assert_close((o, state), (want, last))
    assert torch.equal(alone, o) and torch.equal(again, found)
    assert found.shape == (2, 2, 2, *((48, 32) if v_first else (32, 48))) and found.is_contiguous()
    for j in range(2):
        _, want = call(*(x[:, :(j + 1) * EVERY] for x in tensors), initial_state=given, output_final_state=True,
                       state_v_first=v_first)
        torch.testing.assert_close(found[:, j], want)


@pytest.mark.parametrize("op", OPS)
def test_of_packed_sequences(op):
    """Lengths 0, 64, 63, 130, and numbers that fall; rows by the first token."""
    cuts = 3, 3, 67, 130, 260, 100
    tensors, initial = make(op, 1, 270, 5)
    call, cu = getattr(tkq, op), torch.tensor(cuts, dtype=torch.int32)
    o, found = call(*tensors, initial_state=initial, cu_seqlens=cu, checkpoint_every=EVERY)
    torch.testing.assert_close(o, call(*tensors, initial_state=initial, cu_seqlens=cu))
    assert found.shape == (4, 2, 32, 48)
    written = set()
    for n, (first, end) in enumerate(((3, 3), (3, 67), (67, 130), (130, 260))):
        for j in range((end - first) // EVERY):
            part = [x[:, first:first + (j + 1) * EVERY] for x in tensors]
            _, want = call(*part, initial_state=initial[n:n + 1], output_final_state=True)
            torch.testing.assert_close(found[first // EVERY + j], want[0])
            written.add(first // EVERY + j)
    assert written == {0, 2, 3} and not found[1].any()


@pytest.mark.parametrize("op", OPS)
def test_more_tokens_than_there_are(op):
    tensors, _ = make(op)
    o, found = getattr(tkq, op)(*tensors, checkpoint_every=192)
    assert found.shape == (2, 0, 2, 32, 48) and torch.equal(o, getattr(tkq, op)(*tensors))


@pytest.mark.parametrize("op", OPS)
def test_shapes_without_data(op):
    tensors, _ = make(op, 1)
    cu = torch.tensor([0, 70, 150]).to("meta")
    found = getattr(tkq, op)(*(x.to("meta") for x in tensors), output_final_state=True, cu_seqlens=cu,
                             checkpoint_every=EVERY)
    assert [tuple(x.shape) for x in found] == [(1, 150, 2, 48), (2, 2, 32, 48), (2, 2, 32, 48)]


@pytest.mark.parametrize("op", OPS)
def test_in_a_program_of_compile(op):
    tensors, initial = make(op, state=2)
    call = lambda *x: getattr(tkq, op)(*x[:-1], initial_state=x[-1], output_final_state=True, checkpoint_every=EVERY)
    for found, want in zip(torch.compile(call, fullgraph=True, backend="aot_eager")(*tensors, initial),
                           call(*tensors, initial)):
        assert torch.equal(found, want)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("more, error, words", [
    (dict(checkpoint_every=96), ValueError, "checkpoint_every: is 96, allowed are multiples of 64"),
    (dict(checkpoint_every=0), ValueError, "checkpoint_every: "), (dict(checkpoint_every=64.0), TypeError,
                                                                    "checkpoint_every: "),
    (dict(state_indices=torch.tensor([0, 1]), initial_state=torch.zeros(2, 2, 32, 48)), NotImplementedError,
     "checkpoint_every: with state_indices")])
def test_what_is_refused(op, more, error, words):
    tensors, _ = make(op, tokens=3)
    with pytest.raises(error, match=f"{op}: {words}"):
        getattr(tkq, op)(*tensors, **(dict(checkpoint_every=EVERY) | more))


@pytest.mark.parametrize("op", OPS)
def test_gradients_and_gates_of_columns_are_refused(op):
    (q, k, v, g, *beta), _ = make(op, tokens=3)
    call = getattr(tkq, op)
    with pytest.raises(NotImplementedError, match="checkpoint_every: with a g of four dimensions"):
        call(q, k, v, g[..., None].expand(-1, -1, -1, 32).contiguous(), *beta, checkpoint_every=EVERY)
    with pytest.raises(NotImplementedError, match="checkpoint_every: with a tensor that requires a gradient"):
        call(q.requires_grad_(), k, v, g, *beta, checkpoint_every=EVERY)
    with torch.no_grad():
        call(q, k, v, g, *beta, checkpoint_every=EVERY)


def ssd(batch=2, tokens=150, **more):
    torch.manual_seed(0)
    return dict(x=torch.randn(batch, tokens, 2, 32).to(BF16), dt=torch.rand(batch, tokens, 2), A=-torch.rand(2),
                B=torch.randn(batch, tokens, 1, 48).to(BF16) / 7, C=torch.randn(batch, tokens, 1, 48).to(BF16),
                D=torch.randn(2), z=torch.randn(batch, tokens, 2, 32).to(BF16), dt_bias=torch.randn(2),
                initial_states=torch.randn(batch, 2, 32, 48), dt_softplus=True, return_final_states=True, **more)


def test_of_mamba2():
    given = ssd()
    y, states, found = tkq.mamba2_ssd(**given, checkpoint_every=EVERY)
    torch.testing.assert_close((y, states), tkq.mamba2_ssd(**given))
    assert found.shape == (2, 2, 2, 32, 48) and found.is_contiguous()
    for j in range(2):
        part = {name: x[:, :(j + 1) * EVERY] if name in ("x", "dt", "B", "C", "z") else x for name, x in given.items()}
        torch.testing.assert_close(found[:, j], tkq.mamba2_ssd(**part)[1])
    call = torch.compile(lambda: tkq.mamba2_ssd(**given, checkpoint_every=EVERY), fullgraph=True, backend="aot_eager")
    assert all(torch.equal(*pair) for pair in zip(call(), (y, states, found)))
    found = tkq.mamba2_ssd(**given | dict(return_final_states=False), checkpoint_every=192)
    assert len(found) == 2 and found[1].shape == (2, 0, 2, 32, 48)


def test_what_mamba2_refuses():
    with pytest.raises(ValueError, match="mamba2_ssd: checkpoint_every: is 100, allowed are multiples of 64"):
        tkq.mamba2_ssd(**ssd(), checkpoint_every=100)
    given = ssd()
    given["A"].requires_grad_()
    with pytest.raises(NotImplementedError, match="mamba2_ssd: checkpoint_every: with a tensor that requires"):
        tkq.mamba2_ssd(**given, checkpoint_every=EVERY)


@pytest.mark.parametrize("op", ["linear_attn", "gated_delta_rule"])
@pytest.mark.parametrize("name", ["k", "initial_state"])
def test_a_tangent_is_refused_by_its_argument(op, name):
    x, beta = torch.ones(1, 64, 1, 32, dtype=torch.bfloat16), torch.ones(1, 64, 1)
    given = {"q": x, "k": x, "v": x, "initial_state": torch.zeros(1, 1, 32, 32)}
    if op == "gated_delta_rule":
        given |= {"g": None, "beta": beta}
    with forward_ad.dual_level():
        given[name] = forward_ad.make_dual(given[name], given[name])
        for more in (dict(checkpoint_every=64), dict(state_indices=torch.tensor([0]))):
            with pytest.raises(NotImplementedError, match=f"^{op}: {name} carries a tangent"):
                getattr(tkq, op)(**given, **more)


@pytest.mark.parametrize("name", ["B", "initial_states"])
def test_a_tangent_of_a_pool_of_mamba2_is_refused_by_its_argument(name):
    given = ssd(tokens=3)
    with forward_ad.dual_level():
        given[name] = forward_ad.make_dual(given[name], given[name])
        with pytest.raises(NotImplementedError, match=f"^mamba2_ssd: {name} carries a tangent"):
            tkq.mamba2_ssd(**given, state_indices=torch.tensor([0, 1]))
