"""norm_backward by how many rows there are: every plan of a shape, on both sides of where one ends."""
import pytest
import torch

import tkq
from tests.helpers.norms.backward import NAN, check, make, statistics
from tkq.norms.backward import plan
from tkq.norms.backward.catalog import spec
from tkq.norms.backward.ops import norm_backward
from tkq.runtime.device import arch

WAYS = [("rmsnorm", 1024), ("layernorm", 1024), ("layernorm", 2048), ("rmsnorm", 4096), ("layernorm", 4096)]


def ends(kind, N):
    """The most rows of each plan but the last, and one more."""
    found = plan.limits(spec(kind, N).shape, arch.num_sms("cuda"))
    return [m for most, _ in found[:-1] for m in (most, most + 1)]


@pytest.mark.parametrize("kind, N", WAYS)
def test_where_a_plan_ends(kind, N):
    """The same rows by both: dx to a rounding, which judge() has for each."""
    for M in ends(kind, N):
        check(kind, *make(M, N))


@pytest.mark.parametrize("kind, N", WAYS)
def test_fewest_rows(kind, N):
    for M in (1, 2, 9, 133, 1057):
        check(kind, *make(M, N), what="few")


@pytest.mark.parametrize("kind, N", WAYS)
def test_all_plans_in_turns_give_the_same_bits_again(kind, N):
    """Each call's grid comes under the end of one of another plan, and takes its room and its counter."""
    given = []
    for M in (5, *ends(kind, N), 1057):
        dy, x, weight = make(M, N)
        given.append((kind, dy, x, weight, *statistics(kind, x)))
    needs = (True, True, kind == "layernorm")
    first = [norm_backward(*call, needs=needs)[:3] for call in given]
    for _ in range(5):
        for call, wanted in zip(given, first):
            got = norm_backward(*call, needs=needs)[:3]
            assert all(a is b is None or torch.equal(a, b) for a, b in zip(got, wanted))


def test_another_number_of_rows_in_a_cuda_graph():
    """Its kernel was never called before the capture: no other call has this offset."""
    N, offset = 1024, dict(weight_offset=0.375)
    given = [make(M, N) for M in (100, ends("rmsnorm", N)[-1])]
    numbers = [statistics("rmsnorm", x) for _, x, _ in given]
    norm_backward("rmsnorm", *given[0], *numbers[0], **offset)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dx, dweight, *_ = norm_backward("rmsnorm", *given[1], *numbers[1], **offset)
    dx.fill_(NAN), dweight.fill_(NAN)
    graph.replay()
    wanted = norm_backward("rmsnorm", *given[1], *numbers[1], **offset)
    assert torch.equal(dx, wanted[0]) and torch.equal(dweight, wanted[1])


def test_rows_that_vary_are_compiled_once():
    """torch.compile with a dynamic M on both sides of a plan's end."""
    N = 1024
    most = ends("rmsnorm", N)[0]
    weight = torch.randn(N, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def gradients(f, x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(f(x, weight).float().sum(), (x, weight))

    torch._dynamo.reset()
    compiled = torch.compile(tkq.rmsnorm, dynamic=True, backend="aot_eager")
    xs = [torch.randn(M, N, device="cuda", dtype=torch.bfloat16) for M in (700, most, most + 1, 300)]
    for i, x in enumerate(xs):
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            got = gradients(compiled, x)
        assert all(torch.equal(a, b) for a, b in zip(got, gradients(tkq.rmsnorm, x)))
