"""runtime.call.replay: arguments that are views and lists in lists, calls of several launches, and tensors that share
memory."""
import functools

import pytest
import torch

from tests.cpu.runtime.test_replay import Kernel, W, X, facts, op
from tkq.runtime.call.replay import CallCache, Launch, Launched, View
from tkq.runtime.compile import link

pytestmark = pytest.mark.skipif(link.compiler() is None, reason="no C compiler")


def test_lists_in_lists_and_views():
    """Views of what is given and of what is made, in other sizes and as another type; in each call where they are."""
    kernel, calls = Kernel(), CallCache()

    def call(x):
        y = torch.empty(8, 4)
        views = View(x, x[1:].t()), View(y, y.t()), View(x, x.view(torch.int32)[:, 2:3].expand(4, 5))
        calls.add((x,), kernel.run, (((views[0], (views[1], None)), (3, (2.5,), ())), *views[1:]), y)
        return views

    for _ in range(2):
        call(torch.zeros(4, 8))
    for _ in range(3):
        x = torch.zeros(4, 8)
        y = calls.take(x)
        a, b, c = facts(x[1:].t()), facts(y.t()), facts(x.view(torch.int32)[:, 2:3].expand(4, 5))
        assert kernel.given.pop() == (((a, (b, None)), (3, (2.5,), ())), b, c)
    assert not kernel.given


def test_launches_one_after_the_other():
    """With memory between them that the call does not return; where one of them refuses, nothing comes behind it."""
    first, then, calls = Kernel(), Kernel(), CallCache()

    def add(x):
        between, y = torch.empty(2, 3, dtype=torch.bfloat16), torch.empty(5)
        launches = Launch(first.run, ((x, 1), between)), Launch(then.run, (between, (y, 2.0), x))
        calls.add_launched((x,), lambda: Launched(launches, (y, x), between=(between,)))

    for _ in range(2):
        add(torch.zeros(4, 8))
    for _ in range(3):
        x = torch.zeros(4, 8)
        y, same = calls.take(x)
        ((given, one), between), (also, (into, two), last) = first.given.pop(), then.given.pop()
        assert same is x and given == last == facts(x) and (one, two) == (1, 2.0) and into == facts(y)
        assert between == also and between[:3] == ((2, 3), (3, 1), "bfloat16")
        assert between[3] not in (x.data_ptr(), y.data_ptr())
    first.error = ValueError("no")
    assert calls.take(x) is None and len(first.given) == 1 and not then.given
    first.error = None
    assert calls.take(x) is None and len(first.given) == 1, "refused for good"


def test_several_launches_that_are_none():
    calls, kernel, y = CallCache(), Kernel(), torch.empty_like(X)
    one, other = Launch(kernel.run, (X, y)), Launch(lambda *given: None, (X, y))
    for launches in ((one, other), (one,) * 3, (one, Launch(kernel.run, (W, y)))):
        for _ in range(3):
            calls.add_launched((X,), functools.partial(Launched, launches, y))
        assert calls.take(X) is None
    asked = []
    for _ in range(4):
        calls.add_launched((X, 1), lambda: asked.append(1) or Launched((one,), y))
    assert len(asked) == 1 and calls.take(X, 1) is not None, "asked for once"


def test_tensors_that_share_memory_are_another_call():
    """What is written may lie where another is read: the long way looks at that. With the same distance it has."""
    memory, kernel = torch.zeros(100), Kernel()

    def at(first):
        return memory[first:first + 32].view(4, 8)

    _, call, long = op(kernel)
    for _ in range(3):
        call(at(0), at(64), 0.5)  # apart
    assert len(long) == 2
    call(at(4), at(60), 0.5)
    assert len(long) == 2, "apart, too"
    call(at(0), at(32), 0.5)
    assert len(long) == 2, "the one begins where the other ends"
    for _ in range(2):
        call(at(0), at(28), 0.5)
    assert len(long) == 3
    call(at(8), at(36), 0.5)
    assert len(long) == 3, "the same distance"
    call(at(36), at(8), 0.5)
    call(at(0), at(24), 0.5)
    assert len(long) == 5, "behind instead of before; another distance"


def test_tensors_between_each_other():
    """As queries, keys and values of one product: a call like another, as long as their places among each other are."""
    one, other, (_, call, long) = torch.zeros(4, 24), torch.ones(4, 24), op(Kernel())
    for qkv in (one, one, other, one):
        call(qkv[:, :8], qkv[:, 16:], 0.5)
    assert len(long) == 2
    call(one[:, :8], other[:, 16:], 0.5)
    assert len(long) == 3
