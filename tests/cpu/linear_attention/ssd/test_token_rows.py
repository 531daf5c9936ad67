"""Mamba-2's gradients by rows of tokens, on a CPU: which launches, how they are laid out, what is computed."""
import pytest
import torch

from tests.helpers import linear_launches
from tests.helpers.emulation import token_rows as emulation
from tests.helpers.process.loops import CACHED, in_loops
from tests.helpers.process.machine_code import entry_of
from tkq.linear_attention.catalog import shipped
from tkq.linear_attention.launch import Given, Steps, recipe, spec_of
from tkq.linear_attention.plan import SHARED
from tkq.linear_attention.token_rows.config import RowsConfig
from tkq.linear_attention.token_rows.plan import by_rows, plan

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


@pytest.mark.parametrize("S", [1, 64, 65, 200, 700])
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


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("kind, N", [("c", 128), ("b", 128), ("x", 128), ("c", 64), ("b", 64), ("x", 64)])
def test_there_is_room(kind, N, summed):
    """Of tokens, states, outputs and what the other head sends, and 12 KB of factors and sums."""
    spec = spec_of(given_of(kind, 64, N)._replace(summed=summed and kind != "x" and N == 128))
    K, V, parts = spec.head_dim, spec.value_dim, 2 if spec.dot else 1
    tokens = plan(spec).stages * 128 * (2 * K + V * (1 + spec.has_x))
    rest = plan(spec).states * parts * 128 * max(K, V) + 256 * (64 if spec.summed else V) + 2 * 8192 * spec.summed
    assert tokens + rest + 12 * 1024 <= SHARED + 5 * 1024
    assert plan(spec).stages in (3, 4)


ROWS = {kernel.name: kernel.recipe for kernel in shipped() if "TokenRows" in kernel.recipe.builder}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.machine_code(recipe=lambda name: ROWS[name])
def test_loops_are_in_the_instruction_cache(name, machine_code):
    """Beyond it each instruction takes twice as long. Of two heads' sums it is just full."""
    count, = in_loops(entry_of(ROWS[name]).path).values()
    assert 600 < count <= CACHED + 16


def test_which_launches():
    """Gradients of batches, with heads of 64 and states of 64 and 128 columns."""
    given = given_of("c", 64)
    assert "TokenRows" in recipe(spec_of(given)).builder
    others = (given._replace(cu=torch.tensor([0, 64])), given._replace(part="states", initial=None, x=None),
              given._replace(x=None, initial=None), given_of("c", 64, 96), given_of("x", 64, 144),
              given._replace(q=given.v, k=given.v, v=given.q, x=given.q))  # P 128
    assert not any(by_rows(spec_of(x)) for x in others)


def test_stages_that_are_too_few():
    for stages, states in ((1, 1), (2, 0)):
        with pytest.raises(ValueError, match=f"stages is {stages}, states is {states}, allowed are stages"):
            RowsConfig(stages, states)
