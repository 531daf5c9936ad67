"""runtime.call.replay: calls that came before, which take no Python. Kernels are replaced by notes of arguments."""
import gc
import pathlib
import subprocess
import sys
import threading
import types
import weakref

import pytest
import torch
import tvm_ffi
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.process import ffi_tensors
from tkq.runtime.call import ops, replay
from tkq.runtime.call.replay import Address, CallCache, View
from tkq.runtime.compile import link

pytestmark = pytest.mark.skipif(link.compiler() is None, reason="no C compiler")


def seen(given):
    """What a kernel is given, as plain values: while the call lasts."""
    if ffi_tensors.is_tensor(given):
        return tuple(given.shape), tuple(given.strides), str(given.dtype), ffi_tensors.address(given)
    return tuple(map(seen, given)) if isinstance(given, tvm_ffi.Array) else given


def facts(t):
    return tuple(t.shape), tuple(t.stride()), str(t.dtype).removeprefix("torch."), t.data_ptr()


class Kernel:
    def __init__(self):
        self.given, self.error = [], None
        self.run = tvm_ffi.convert(self.note)

    def note(self, *given):
        self.given.append(tuple(map(seen, given)))
        del given  # borrowed for the call, and an error keeps this frame for longer
        if self.error:
            raise self.error


X, W = torch.zeros(4, 8), torch.ones(8)


def op(kernel, made=torch.empty_like):
    """A function as replay.py says an op is: (its calls, a function of (x, weight, number), what went the long way)."""
    calls, long = CallCache(), []

    def call(x, weight, number):
        found = calls.take(x, weight, number)
        if found is None:
            long.append(number)
            found = made(x)
            given = x, weight, found, None, (Address(x), 7), number
            kernel.run(x, weight, found, None, (x.data_ptr(), 7), number)
            calls.add((x, weight, number), kernel.run, given, found)
        return found

    return calls, call, long


def test_the_third_call_takes_no_python():
    kernel = Kernel()
    calls, call, long = op(kernel)
    assert calls.take(X, W, 0.5) is None, "nothing was added"
    for i in range(5):
        x = torch.zeros(4, 8)
        y = call(x, W, 0.5)
        assert kernel.given[-1] == (facts(x), facts(W), facts(y), None, (x.data_ptr(), 7), 0.5)
        assert y.shape == x.shape and y.stride() == x.stride() and y.dtype == x.dtype and type(y) is torch.Tensor
        assert len(long) == min(i + 1, 2)


OTHERS = {
    "type": (X.double(), W, 0.5), "size": (X[:3], W, 0.5), "stride": (torch.zeros(4, 16)[:, :8], W, 0.5),
    "address": (torch.zeros(33)[1:].view(4, 8), W, 0.5), "dimensions": (X.view(1, 4, 8), W, 0.5),
    "nothing": (X, None, 0.5), "a number": (X, W, 0.25), "a number of another type": (X, W, True),
    "a word": (X, W, "0.5"), "one tensor twice": (X, X, 0.5), "no numbers": (X[:0], W, 0.5),
    "a list": (X, W, [0.5]), "a subclass": (X.as_subclass(type("Mine", (torch.Tensor,), {})), W, 0.5),
    "not dense": (torch.zeros(4, 8).to_sparse(), W, 0.5), "no memory": (torch.zeros(4, 8, device="meta"), W, 0.5),
    "zeros that are nowhere": (torch._efficientzerotensor((4, 8)), W, 0.5),
    "a pending negation": (torch._neg_view(X), W, 0.5), "of another input": (X, torch._neg_view(W), 0.5),
    "too many dimensions": (X.view(1, 1, 1, 1, 4, 8), W, 0.5)}


@pytest.mark.parametrize("name", OTHERS)
def test_a_call_that_is_not_the_same_goes_the_long_way(name):
    calls, call, long = op(Kernel())
    for _ in range(3):
        call(X, W, 0.5)
    long.clear()
    assert calls.take(*OTHERS[name]) is None
    assert calls.take(X, W) is None and calls.take() is None and calls.take(X, W, 0.5, None) is None
    assert calls.take(X, W, 0.5) is not None


def test_one_tensor_given_twice():
    kernel = Kernel()
    _, call, long = op(kernel)
    for _ in range(3):
        call(X[0], W, 0.5)
    for _ in range(3):
        call(W, W, 0.5)
        assert kernel.given[-1][0] == kernel.given[-1][1] == facts(W)
    assert len(long) == 4
    call(X[0], W, 0.5)
    assert kernel.given[-1][:2] == (facts(X[0]), facts(W)) and len(long) == 4


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ("a gradient", "a dispatch mode", "functorch", "forward mode", "filling"))
def test_only_in_plain_eager_mode(name):
    """Where `ops.route` says something else than "direct", or torch fills what is new."""
    calls, call, _ = op(Kernel())
    for _ in range(3):
        call(X, W, 0.5)
    found, asked = [], []

    def ask(x):
        found.append(calls.take(x, W, 0.5))
        asked.append(ops.route(x, W))
        return x

    if name == "a gradient":
        needs = X.clone().requires_grad_()
        ask(needs), ask(torch.nn.Parameter(X))
        with torch.no_grad():
            assert all(calls.take(x, W, 0.5) is not None for x in (needs, torch.nn.Parameter(X)))
    elif name == "a dispatch mode":
        with Watching():
            ask(X)
    elif name == "functorch":
        torch.func.vmap(lambda x: (ask(X), x)[1])(X)
    elif name == "forward mode":
        with forward_ad.dual_level():
            ask(X)
    else:
        torch.use_deterministic_algorithms(True)
        try:
            ask(X)
            asked.clear()
        finally:
            torch.use_deterministic_algorithms(False)
    assert found and all(results is None for results in found) and "direct" not in asked
    assert calls.take(X, W, 0.5) is not None


def test_several_results():
    kernel, calls = Kernel(), CallCache()
    x, counter = torch.zeros(4, 8), torch.zeros(1, dtype=torch.int32)
    y, rows = torch.empty(4, 8, dtype=torch.bfloat16), torch.empty_strided((4, 3), (1, 4))
    for _ in range(2):
        calls.add((x, "both"), kernel.run, ((x, y, None), (1, 2.5), rows, counter), (y, None, x, rows), (counter,))
    for _ in range(3):
        z, nothing, same, scale = calls.take(x, "both")
        assert nothing is None and same is x and z.dtype == torch.bfloat16 and scale.stride() == (1, 4)
        assert kernel.given.pop() == ((facts(x), facts(z), None), (1, 2.5), facts(scale), facts(counter))
        assert len({t.data_ptr() for t in (x, y, z, rows, scale)}) == 5
    calls.clear()
    assert calls.take(x, "both") is None


def test_what_else_is_compared():
    """Types that a function names; and numbers by their bits: 0.0 is not -0.0."""
    kernel, calls = Kernel(), CallCache(compared=(types.CodeType,))
    codes = [eval("lambda x: x + 1").__code__ for _ in range(2)] + [eval("lambda x: x + 2").__code__]
    for _ in range(2):
        calls.add((X, codes[0], 0.0), kernel.run, (X,), X)
    assert calls.take(X, codes[1], 0.0) is X
    assert calls.take(X, codes[2], 0.0) is None and calls.take(X, codes[0], -0.0) is None
    assert calls.take(X, codes[0], 0) is None


def test_what_is_refused_is_not_tried_again():
    kernel = Kernel()
    _, call, long = op(kernel)
    for _ in range(3):
        call(X, W, 0.5)
    kernel.given.clear()
    kernel.error = ValueError("not such an x")
    with pytest.raises(ValueError, match="not such an x"):
        call(X, W, 0.5)
    assert len(kernel.given) == 2, "once from C, once for the words"
    kernel.error = None
    for _ in range(3):
        call(X, W, 0.5)
    assert len(long) == 2 + 4 and len(kernel.given) == 2 + 3


def test_what_cannot_be_described_is_not_recorded():
    calls, kernel, y = CallCache(), Kernel(), torch.empty_like(X)
    known, six = kernel.run, [y.clone() for _ in range(6)]
    for run, arguments, result in ((lambda *given: None, (X, y), y), (known, (X, y, object()), y), (known, (X, W), y),
                                   (known, (View(W, W[1:]), y), y), (known, (Address(W), y), y),
                                   (known, (View(X, X.clone()), y), y), (known, (X, *[X] * 64), X),
                                   (known, (X, 1 << 70), X),
                                   (known, (X, *six), tuple(six)), (known, (X, *((X,),) * 17), X),
                                   (known, tuple(View(X, X[i:]) for i in range(4)) * 6, X),
                                   (known, (View(X, X.view(1, 1, 1, 1, 4, 8)), y), y)):
        for _ in range(3):
            calls.add((X, 1.0), run, arguments, result)
        assert calls.take(X, 1.0) is None
    for _ in range(3):
        calls.add((X, [1.0]), kernel.run, (X, y), y)
        calls.add((X, types), kernel.run, (X, y), y)
    assert calls.take(X, [1.0]) is None and calls.take(X, types) is None


def test_what_is_known_does_not_grow_for_ever():
    """And what comes on and on gets a place of another's."""
    kernel, calls = Kernel(), CallCache()
    inputs = [(torch.empty(1).expand(n), float(n)) for n in range(1, 2000)]
    for given in inputs:
        for _ in range(2):
            calls.add(given, kernel.run, (given[0],), given[0])
    assert 400 < sum(calls.take(*given) is not None for given in inputs) <= 512
    given = next(given for given in inputs if calls.take(*given) is None)
    for _ in range(40):
        calls.add(given, kernel.run, (given[0],), given[0])
    assert calls.take(*given) is given[0]
    assert 400 < sum(calls.take(*given) is not None for given in inputs) <= 512


def test_what_is_noted():
    """With a call that was added, and also where autograd records it; gone with that."""
    class Note:
        pass

    kernel, what, other = Kernel(), Note(), Note()
    calls, call, _ = op(kernel)
    x = X.clone().requires_grad_()
    assert not calls.note(what, X, W, 0.5) and calls.known(X, W, 0.5) is None
    with torch.no_grad():
        for _ in range(2):
            call(X, W, 0.5)
    assert calls.known(x, W, 0.5) is None, "nothing was noted"
    assert not calls.note(what, X, W, 0.25) and calls.note(what, X, W, 0.5)
    assert calls.take(x, W, 0.5) is None, "of what requires a gradient"
    assert calls.known(x, W, 0.5) is what and calls.known(torch.empty_like(X), W, 0.5) is what
    assert calls.known(x, W, 0.25) is None and calls.known(x[:2], W, 0.5) is None and calls.known() is None
    with torch.autograd.forward_ad.dual_level():
        assert calls.known(x, W, 0.5) is None, "not in plain eager mode"
    gone = weakref.ref(what)
    calls.note(other, X, W, 0.5)
    del what
    gc.collect()
    assert gone() is None and calls.known(x, W, 0.5) is other
    kernel.error, gone = RuntimeError("refused"), weakref.ref(other)
    with torch.no_grad():
        assert calls.take(X, W, 0.5) is None
    assert calls.known(x, W, 0.5) is None, "such calls go the long way"
    del other
    calls.clear()
    gc.collect()
    assert gone() is None and calls.known(x, W, 0.5) is None


def test_nothing_of_a_call_is_held():
    def note(*given):
        pass

    run, calls, x = tvm_ffi.convert(note), CallCache(), torch.zeros(4, 8)
    word = "".join(["a", " word"])
    before = sys.getrefcount(x), sys.getrefcount(word), sys.getrefcount(None)
    y = torch.empty_like(x)
    for _ in range(2):
        calls.add((x, word), run, (x, y), (y, x, None))
    gone = weakref.ref(y)
    del y
    assert gone() is None and sys.getrefcount(x) == before[0] and sys.getrefcount(word) == before[1] + 1
    for _ in range(100):
        assert calls.take(x, word) is not None
    assert sys.getrefcount(x) == before[0] and abs(sys.getrefcount(None) - before[2]) < 50
    found = weakref.ref(calls.take(x, word)[0])
    gc.collect()
    assert found() is None
    gone = weakref.ref(note)
    del note, run
    assert gone() is not None
    del calls
    gc.collect()
    assert sys.getrefcount(word) == before[1] and gone() is None


def test_from_many_threads_while_all_is_forgotten():
    kernel, wrong = Kernel(), []
    calls, call, _ = op(kernel)

    def work(n):
        for i in range(300):
            x = torch.full((n, 8), float(n))
            y = call(x, W, 0.5)
            if y.shape != x.shape:
                wrong.append(n)
            if n == 1 and i % 20 == 0:
                calls.clear()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong and len(kernel.given) == 5 * 300
    assert {given[0][0] for given in kernel.given} == {given[2][0] for given in kernel.given}


def test_without_a_compiler_nothing_is_remembered(monkeypatch):
    monkeypatch.setattr(replay, "_library", lambda: None)
    kernel = Kernel()
    _, call, long = op(kernel)
    for _ in range(4):
        call(X, W, 0.5)
    assert len(long) == 4


def test_the_source_has_no_warnings():
    sources, include = pathlib.Path(replay.__file__).parent.glob("replay*.c"), tvm_ffi.libinfo.include_paths()
    done = subprocess.run([link.compiler(), "-std=c11", "-Wall", "-Wextra", "-Werror", "-fsyntax-only",
                           *map(str, sources), *(f"-I{path}" for path in include)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_library_that_cannot_be_loaded(monkeypatch, tmp_path):
    """As from a cache that a machine with another loader shares: calls take the long way, and nothing is raised."""
    broken = tmp_path / "replay.so"
    broken.write_bytes(b"no library")
    monkeypatch.setattr(replay.native, "library", lambda kind: broken)
    with pytest.warns(UserWarning, match="calls take longer"):
        assert replay._library.__wrapped__() is None


# ---- the way of a call ----------------------------------------------------------------------------------------------


def ways(*tensors):
    """(what is said in C, what Python says)"""
    assert replay._library() is not None
    return ops.short.route(*tensors), ops._route(tensors)


LEAF = torch.zeros(4, 8, requires_grad=True)
ROUTES = {"plain": ("direct", (X, W)), "None": ("direct", (X, None, W)), "no first": (None, (None, X)),
          "nothing": (None, ()), "a leaf": ("record", (LEAF, W)), "another leaf": ("record", (X, None, LEAF)),
          "a parameter": ("record", (torch.nn.Parameter(X),)), "no tensor": (None, (X, 1.0)),
          "a subclass": (None, (X.as_subclass(type("Mine", (torch.Tensor,), {})),)),
          "a pending negation": (None, (torch._neg_view(X),)), "of a second": (None, (X, torch._neg_view(W))),
          "of a leaf": (None, (LEAF, torch._neg_view(W))), "nowhere": (None, (torch._efficientzerotensor((4, 8)),))}


@pytest.mark.parametrize("name", ROUTES)
def test_the_way_of_a_call_is_the_same_in_c(name):
    wanted, tensors = ROUTES[name]
    found, said = ways(*tensors)
    assert found == wanted and said == (wanted or ("op" if tensors else "direct"))
    with torch.no_grad():
        assert ways(*tensors)[0] == ("direct" if wanted else None)


@pytest.mark.parametrize("name", ("a dispatch mode", "functorch", "forward mode", "torch.jit.trace"))
def test_there_is_no_short_way_where_something_watches(name):
    seen = []

    def look(x):
        seen.append(ways(X, W))
        return x + 1

    if name == "a dispatch mode":
        with Watching():
            look(X)
    elif name == "functorch":
        torch.func.vmap(look)(X)
    elif name == "forward mode":
        with forward_ad.dual_level():
            look(X)
    else:
        torch.jit.trace(look, X, check_trace=False)
    assert seen == [(None, "op")] and ways(X, W) == ("direct", "direct")


def test_a_traced_call_is_not_replayed():
    calls, call, _ = op(Kernel())
    for _ in range(3):
        call(X, W, 0.5)
    seen = []
    torch.jit.trace(lambda x: (seen.append(calls.take(X, W, 0.5)), x + 1)[1], X, check_trace=False)
    assert seen == [None] and calls.take(X, W, 0.5) is not None
