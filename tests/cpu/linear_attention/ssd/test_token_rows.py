"""Mamba-2's gradients by rows of tokens, on a CPU: which launches, how they are laid out, what is computed."""
import pytest
import torch

from tests.helpers import linear_launches
from tests.helpers.emulation import token_rows as emulation
from tkq.linear_attention.launch import Given, Steps

F32, BF16 = torch.float32, torch.bfloat16


def given_of(kind, S, N=128, states=True):
    """Of a launch: "c", "b" or "x", as `ssd.gradients` makes them."""
    torch.manual_seed(0)
    B, H, P = 1, 2, 64
    x, do = (torch.randn(B, S, H, P).to(BF16) for _ in range(2))
    b, c = (torch.nn.functional.normalize(torch.randn(B, S, 1, N), dim=-1).to(BF16) for _ in range(2))
    steps = Steps(torch.randn(B, S, H).to(BF16), -1 - 3 * torch.rand(H), torch.randn(H) - 2, True, 0.0, float("inf"))
    by_keys, by_values = torch.randn(B, H, P, N), torch.randn(B, H, P, N)
    final = F32 if states else None
    if kind == "c":
        return Given(do, x, b, initial=by_keys if states else None, final=final, x=c, steps=steps)
    if kind == "b":
        return Given(x, do, c, initial=by_keys if states else None, reverse=True, steps=steps)
    return Given(b, c, do, initial=by_values if states else None, final=final, x=x, reverse=True, state_v_first=True,
                 steps=steps._replace(skip=torch.randn(H, P), skip_gradient=True))


def wide(given):
    steps = given.steps._replace(**{name: x.double() for name, x in given.steps._asdict().items()
                                    if isinstance(x, torch.Tensor)})
    return given._replace(steps=steps, **{name: x.double() for name, x in given._asdict().items()
                                          if isinstance(x, torch.Tensor)})


@pytest.mark.parametrize("S", [1, 64, 65, 200])
@pytest.mark.parametrize("kind, N", [("c", 128), ("b", 128), ("x", 128), ("c", 64), ("b", 64), ("x", 64)])
def test_what_is_computed(monkeypatch, kind, N, S):
    given = given_of(kind, S, N, states=S != 64)
    want = linear_launches.launched(wide(given), 1.0)
    found = emulation.launched(monkeypatch, given, 1.0)
    for name, close in (("o", 2**-7), ("state", 2**-12), ("dots", 2**-12), ("of_skip", 2**-20), ("diagonal", 2**-20)):
        mine, exact = getattr(found, name), getattr(want, name)
        assert (mine is None) == (exact is None), name
        if exact is not None:
            assert (mine - exact).abs().max() <= close * (1e-3 + exact.abs().max()), name
