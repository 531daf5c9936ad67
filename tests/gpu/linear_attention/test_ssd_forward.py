"""tkq.mamba2_ssd against the recurrence in float64, beside the same launch in plain PyTorch, rounded as the kernel
rounds."""
import math

import pytest
import torch

import tkq
from tests.helpers.linear_launches import launched
from tests.helpers.sanitizer.nan_fill import poisoned
from tkq.linear_attention.ssd.forward import SsdSaved, forward
from tkq.reference.ssd import mamba2_ssd as recurrence
from tkq.testing import assert_2x

BF16, F32 = torch.bfloat16, torch.float32
SIZES = dict(H=4, G=2, P=64, N=128)


def make(B, S, dtype=BF16, of_dt=BF16, bias=-2.0, without=("z", "initial"), D_dims=1, **sizes):
    """As models have it: dt of 16 bits, A from -16 to -1, softplus; its bias is about `bias`."""
    H, G, P, N = (SIZES | sizes).values()
    torch.manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, device="cuda")

    unit = torch.nn.functional.normalize
    given = dict(x=randn(B, S, H, P).to(dtype), dt=randn(B, S, H).to(of_dt), A=-1 - 15 * torch.rand(H, device="cuda"),
                 B=unit(randn(B, S, G, N), dim=-1).to(dtype), C=unit(randn(B, S, G, N), dim=-1).to(dtype),
                 D=randn(*(H, P)[:D_dims]), z=randn(B, S, H, P).to(dtype), dt_bias=bias + 0.5 * randn(H),
                 initial=randn(B, H, P, N))
    return SsdSaved(**{name: None if name in without else x for name, x in given.items()}, softplus=True)


def ours(given, final=True):
    return tkq.mamba2_ssd(*given[:9], given.softplus, given.limit, final, cu_seqlens=given.cu)


def wide(given):
    return given._replace(**{name: x.double() for name, x in given._asdict().items() if isinstance(x, torch.Tensor)})


def check(given):
    with poisoned():
        y, states = ours(given)
    want, last = recurrence(*wide(given))
    peer, peer_states, *_ = launched(forward(given, F32), 1.0)
    assert y.dtype == given.x.dtype and states.dtype == F32
    assert_2x(y, want, peer, what="y")
    # tensor cores cut off what they add to a sum of fp32: an ulp for each 16 tokens at most
    room = 1 + given.x.shape[1] / 16
    assert_2x(states.flatten(0, 2), last.flatten(0, 2), peer_states.flatten(0, 2), ulps=room, bias_ulps=room,
              what="states")
    return y, states


@pytest.mark.parametrize("S", [1, 63, 64, 65, 1000])
def test_lengths(S):
    check(make(2, S))


@pytest.mark.parametrize("G", [1, 8])
@pytest.mark.parametrize("N", [64, 128])
def test_many_heads_of_few_groups(G, N):
    check(make(1, 130, H=80, G=G, N=N))


@pytest.mark.parametrize("P, N", [(32, 32), (48, 80), (80, 96), (128, 128), (144, 64), (256, 128)])
@pytest.mark.sampled(when=lambda P, N: (P, N) in ((80, 96), (256, 128)))
def test_widths(P, N):
    check(make(1, 200, P=P, N=N))


@pytest.mark.parametrize("dtype, of_dt", [(torch.float16, torch.float16), (BF16, F32)])
@pytest.mark.parametrize("without", [("initial",), ("D", "dt_bias", "z"), ()])
@pytest.mark.sampled(when=lambda dtype, without: (dtype == BF16) == (without != ("D", "dt_bias", "z")))
def test_types_and_what_there_is(dtype, of_dt, without):
    check(make(2, 130, dtype, of_dt, without=without))


def test_parameters_of_16_bits():
    given = make(1, 100, without=())
    check(given._replace(D=given.D.to(BF16), dt_bias=given.dt_bias.to(torch.float16), initial=given.initial.to(BF16)))


@pytest.mark.parametrize("P", [80, *(pytest.param(P, marks=pytest.mark.slow) for P in (64, 128))])
def test_a_factor_of_each_column(P):
    check(make(1, 130, P=P, D_dims=2, without=("initial",)))


@pytest.mark.parametrize("bias", [-20.0, 0.0, 3.0, 30.0])
def test_steps(bias):
    """Of almost no step, and those whose decays underflow within a chunk, and from one token to the next."""
    check(make(1, 260, of_dt=F32, bias=bias, without=("z",)))


def test_resets():
    given = make(1, 300, without=("z",))
    given.dt[:, ::37] = 40.0
    check(given)


def test_steps_as_they_are():
    """Without softplus and bias; of every third token 0: it neither adds nor decays."""
    given = make(1, 200, of_dt=F32, without=("dt_bias", "z"))
    given.dt.abs_()
    given.dt[:, ::3] = 0.0
    check(given._replace(softplus=False))


def test_no_steps_at_all():
    given = make(1, 130, without=("dt_bias", "z"))._replace(softplus=False)
    y, states = ours(given._replace(dt=torch.zeros_like(given.dt)))
    assert torch.equal(states, given.initial)
    want = torch.einsum("bhpn,bshn->bshp", given.initial.double(), given.C.double().repeat_interleave(2, 2))
    want = want + given.D.double()[:, None] * given.x.double()
    torch.testing.assert_close(y.double(), want, rtol=2**-7, atol=2**-6)


@pytest.mark.parametrize("limit", [(0.1, 0.2), (0.0, 0.125), (0.5, math.inf)])
def test_limits(limit):
    check(make(1, 130)._replace(limit=limit))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_two_calls_are_one(dtype):
    given = make(2, 256, without=("z",))
    given = given._replace(initial=given.initial.to(dtype))
    y, last = check(given)

    def half(at, initial):
        return given._replace(initial=initial, **{name: getattr(given, name)[:, at] for name in ("x", "dt", "B", "C")})

    first, middle = ours(half(slice(0, 128), given.initial))
    second, end = ours(half(slice(128, None), middle))
    assert torch.equal(torch.cat((first, second), 1), y) and torch.equal(end, last)


def test_views_are_read_in_place():
    """Slices of a packed projection, states of another order, dt of any strides."""
    given = make(2, 100, H=4, G=1, P=64, N=64, without=("dt_bias",))
    packed = torch.randn(2, 100, 4 * 64 * 2 + 2 * 64 + 8, device="cuda").to(BF16)
    z, x, B, C, dt, _ = packed.split((256, 256, 64, 64, 4, 4), -1)
    given = given._replace(x=x.unflatten(-1, (4, 64)), z=z.unflatten(-1, (4, 64)), B=B[:, :, None], C=C[:, :, None],
                           dt=dt, initial=torch.randn(2, 4, 64, 64, device="cuda").mT)
    whole = given._replace(**{name: x.contiguous() for name, x in given._asdict().items()
                              if isinstance(x, torch.Tensor)})
    assert all(map(torch.equal, ours(given), ours(whole)))


def test_nothing_behind_the_end_counts():
    """NaN in the rows behind each tensor's own."""
    given = make(1, 100, without=("initial",))

    def behind(x):
        wide = torch.full((1, 200, *x.shape[2:]), math.nan, device="cuda", dtype=x.dtype)
        wide[:, :100] = x
        return wide[:, :100]

    again = given._replace(**{name: behind(getattr(given, name)) for name in ("x", "dt", "B", "C", "z")})
    assert all(map(torch.equal, ours(given), ours(again)))


def test_not_a_number_stays_one():
    """In dt, through bias, softplus and limits: all that comes behind it is NaN, the other heads are not."""
    given = make(1, 130, of_dt=F32)
    given.dt[0, 70, 1] = math.nan
    y, states = ours(given)
    assert y[0, 70:, 1].isnan().all() and states[0, 1].isnan().all()
    assert y[0, :64].isfinite().all() and y[0, :, [0, 2, 3]].isfinite().all()


def test_no_tokens():
    given = make(2, 0, without=("z",))
    y, states = ours(given)
    assert y.shape == given.x.shape and torch.equal(states, given.initial)


def test_the_same_bits_also_where_calls_are_replayed():
    given = make(2, 1000, without=())
    first = ours(given)
    for _ in range(5):
        assert all(map(torch.equal, ours(given), first))
    assert torch.equal(ours(given, False), first[0])


def test_in_a_cuda_graph():
    given = make(1, 130, without=())
    ours(given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = ours(given)
    for name in ("x", "dt", "B", "C", "z"):
        getattr(given, name).copy_(getattr(given, name).flip(1))
    graph.replay()
    assert all(map(torch.equal, found, ours(given)))


@pytest.mark.slow  # test_every_op.py compiles each function every day
def test_compiled_in_one_graph_with_opcheck():
    given = make(1, 65, without=())
    torch.library.opcheck(torch.ops.tkq.mamba2_ssd.default, (*given[:10], *given.limit, True, given.cu))
    compiled = torch.compile(lambda *x: tkq.mamba2_ssd(*x, dt_softplus=True, return_final_states=True), fullgraph=True)
    assert all(map(torch.equal, compiled(*given[:9]), ours(given)))
