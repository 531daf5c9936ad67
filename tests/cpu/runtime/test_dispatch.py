"""runtime.call.dispatch: which kernel a call takes, and what that is given; in C and in Python alike."""
import contextlib
import math
import pathlib
import subprocess
import sys
import threading
import weakref

import pytest
import torch
import tvm_ffi
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.process import ffi_tensors
from tkq.runtime.call import alloc, dispatch
from tkq.runtime.call.dispatch import Ended, Shapes, added
from tkq.runtime.compile import build, link, native

WAYS = ["C", "Python"] if link.compiler() else ["Python"]


class Kernel:
    """What a kernel is given, by tvm-ffi or by Python."""

    def __init__(self, language):
        self.seen = []
        self.run = tvm_ffi.convert(self.note) if language == "C" else self.note

    def note(self, *args):
        self.seen.append([(tuple(a.shape), tuple(a.stride() if isinstance(a, torch.Tensor) else a.strides),
                           ffi_tensors.address(a)) if ffi_tensors.is_tensor(a) else a for a in args])

    def last(self):
        return self.seen.pop()


@pytest.fixture(params=WAYS)
def language(request, monkeypatch):
    if request.param == "Python":
        monkeypatch.setattr(dispatch, "_in_c", lambda: None)
    return request.param


def facts(t):
    return tuple(t.shape), tuple(t.stride()), t.data_ptr()


X, W = torch.zeros(2, 3, 8), torch.ones(8)


def test_leading_dimensions_become_one(language):
    kernel, y = Kernel(language), torch.zeros(2, 3, 8)
    run = added(None, kernel.run, (X.view(6, 8), W, None, y, 0.5), Shapes({0: 1}, {3: 1}))
    run(X, W, None, y, 0.5)
    assert kernel.last() == [facts(X.view(6, 8)), facts(W), None, facts(y.view(6, 8)), 0.5]
    x = torch.zeros(5, 16)[:, :8]
    run(x, W, None, x, 2)
    assert kernel.last() == [facts(x), facts(W), None, facts(x), 2]
    run(W, W, None, W, 0.5)
    assert kernel.last() == [facts(W.view(1, 8)), facts(W), None, facts(W.view(1, 8)), 0.5]


def test_each_call_takes_the_kernel_of_calls_like_it(language):
    half, wide = X.half(), torch.zeros(2, 3, 16)
    calls = [(X, W, 1.0), (half, W, 1.0), (X, W.half(), 1.0), (X, None, 1.0), (X, W, None), (wide, W, 1.0),
             (X, W.view(1, 8), 1.0)]
    kernels, run = [Kernel(language) for _ in calls], None
    for kernel, call in zip(kernels, calls):
        run = added(run, kernel.run, call, Shapes({0: 1}, {}))
    for kernel, call in zip(kernels, calls):
        run(*call)
        assert kernel.last()[0] == facts(call[0].view(6, -1)) and not any(k.seen for k in kernels)
    for call in ((X.double(), W, 1.0), (torch.zeros(2, 3, 7), W, 1.0), (X, 1.0, 1.0), (X, W)):
        with pytest.raises(ValueError, match="dispatcher"):
            run(*call)


def test_the_same_call_again_takes_the_newer_kernel(language):
    old, newer, other = Kernel(language), Kernel(language), Kernel(language)
    run = added(None, old.run, (X,), Shapes({0: 1}, {}))
    run = added(run, other.run, (X.half(),), Shapes({0: 1}, {}))
    again = added(run, newer.run, (torch.zeros(9, 8),), Shapes({0: 1}, {}))
    again(X), again(X.half()), run(X)
    assert [len(k.seen) for k in (old, newer, other)] == [1, 1, 1]


def test_what_is_no_rows_of_a_matrix_goes_to_a_kernel_that_keeps_more(language):
    rows, heads = Kernel(language), Kernel(language)
    run = added(None, heads.run, (torch.zeros(1, 3, 8),), Shapes({0: 2}, {}))
    run = added(run, rows.run, (W.view(1, 8),), Shapes({0: 1}, {}))
    run(X)
    assert rows.last() == [facts(X.view(6, 8))] and not heads.seen
    x = torch.zeros(2, 5, 3, 4, 8)[:, :, 1]
    run(x)
    assert heads.last() == [((10, 4, 8), (96, 8, 1), x.data_ptr())] and not rows.seen
    with pytest.raises(ValueError, match="dispatcher"):
        run(x.transpose(1, 2)[:, :, 1:4])


def test_a_kernel_takes_what_it_needs_in_its_order(language):
    kernel = Kernel(language)
    run = added(None, Ended(kernel.run, 7), (X, W, 0.5), Shapes({0: 1}, {}, takes=(1, None, 0, 2, None)))
    run(X, W, 0.25)
    assert kernel.last() == [facts(W), None, facts(X.view(6, 8)), 0.25, None, 7]
    Ended(kernel.run, 8)(X, None)
    assert kernel.last() == [facts(X), None, 8]


def test_leading_dimensions_must_be_the_same(language):
    kernel = Kernel(language)
    run = added(None, kernel.run, (X, X), Shapes({0: 1, 1: 1}, {}))
    run(X, X)
    assert len(kernel.seen) == 1
    for other in (X.view(6, 8), X.view(3, 2, 8), X[:1], X.view(1, 2, 3, 8), W):
        with pytest.raises(ValueError, match="dispatcher"):
            run(X, other)
    assert len(kernel.seen) == 1


def test_nothing_and_too_much_are_refused(language):
    kernel = Kernel(language)
    run = added(None, kernel.run, (X,), Shapes({0: 1}, {}))
    for x in (X[:0], X[:, :0], torch.zeros(1, 1, 8).expand(1 << 20, 129, 8)):
        with pytest.raises(ValueError, match="dispatcher"):
            run(x)
    run(torch.zeros(1, 8).expand(dispatch.MOST // 8, 8))
    assert len(kernel.seen) == 1


def test_an_error_of_the_kernel_is_the_calls(language):
    def refuses(x):
        raise TypeError("no such x")

    run = added(None, tvm_ffi.convert(refuses) if language == "C" else refuses, (X,), Shapes({0: 1}, {}))
    with pytest.raises(TypeError, match="no such x"):
        run(X)


def test_what_is_known_does_not_grow_for_ever(language):
    kernel, run = Kernel(language), None
    for n in range(1, 600):
        run = added(run, kernel.run, (torch.zeros(1, n),), Shapes({0: 1}, {}))
    run(torch.zeros(4, 599))
    with pytest.raises(ValueError, match="dispatcher"):
        run(torch.zeros(4, 1))


def test_calls_from_many_threads_while_kernels_are_added(language):
    """A dispatcher does not change: a call of one sees all of its kernels, or none yet."""
    sizes = range(1, 100)
    kernels = {n: Kernel(language) for n in sizes}
    known = {"run": None}

    def calls():
        for _ in range(3):
            for n in sizes:
                with contextlib.suppress(ValueError):  # not added yet
                    known["run"](torch.zeros(2, 3, n))

    threads = [threading.Thread(target=calls) for _ in range(4)]
    for i, n in enumerate(sizes):
        known["run"] = added(known["run"], kernels[n].run, (torch.zeros(1, n),), Shapes({0: 1}, {}))
        if i == 10:
            for t in threads:
                t.start()
    for t in threads:
        t.join()
    for n in sizes:
        known["run"](torch.zeros(2, 3, n))
        assert kernels[n].seen and all(shape == (6, n) for (shape, _, _), in kernels[n].seen)


SIZES = st.lists(st.integers(1, 4), min_size=0, max_size=5)


@st.composite
def tensors(draw):
    """Views of all kinds: dimensions in any order, of one element, spread out, repeated, cut."""
    sizes = draw(SIZES)
    x = torch.zeros([2 * n + 1 for n in sizes] + [8])
    for i, n in enumerate(sizes):
        start, step = draw(st.sampled_from(((0, 1), (1, 1), (0, 2))))
        x = x.narrow(i, start, 2 * n) if draw(st.booleans()) else x
        x = x[(slice(None),) * i + (slice(None, None, step),)]
    if draw(st.booleans()):
        x = x.contiguous()
    if draw(st.booleans()):
        order = draw(st.permutations(range(x.dim() - 1)))
        x = x.permute(*order, x.dim() - 1)
    if x.dim() > 1 and draw(st.booleans()):
        x = x[:1].expand(3, *x.shape[1:])
    return x


@given(tensors(), st.integers(1, 2))
def test_dimensions_are_joined_where_torch_can_view_them(x, row_dims):
    """And to the same: torch's `view` says which strides describe a merged dimension."""
    if x.dim() < row_dims:
        return
    try:
        want = x.view(-1, *x.shape[x.dim() - row_dims:])
    except RuntimeError:
        want = None
    for language in WAYS:
        kernel = Kernel(language)
        run = added(None, kernel.run, (x,), Shapes({0: row_dims}, {}))
        if language == "Python":
            run = dispatch._InPython(None, dispatch._Entry(kernel.run, None, [0], [row_dims | 32], dispatch._look(
                [row_dims | 32], (x,))))
        if want is None:
            with pytest.raises(ValueError, match="dispatcher"):
                run(x)
            continue
        run(x)
        (shape, strides, pointer), = kernel.last()
        assert shape == want.shape and pointer == x.data_ptr()
        assert all(n == 1 or a == b for n, a, b in zip(shape, strides, want.stride()))  # of one element any will do
        if x.dim() != row_dims + 1:
            assert shape[0] > 1 or strides[0] == math.prod(shape[1:])
            assert alloc.folded(x, row_dims).stride() == strides


def test_without_a_compiler_calls_take_the_other_way(monkeypatch, tmp_path):
    monkeypatch.setattr(link, "compiler", lambda: None)
    monkeypatch.setattr(build, "_cache", build.Cache(tmp_path))
    assert dispatch._in_c.__wrapped__() is None
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(len(WAYS) == 1, reason="no C compiler")
def test_it_is_compiled_once_and_cached(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "_cache", build.Cache(tmp_path))
    assert isinstance(dispatch._in_c.__wrapped__(), tvm_ffi.Function)
    monkeypatch.setattr(native, "_compiled", lambda kind: pytest.fail("compiled again"))
    assert isinstance(dispatch._in_c.__wrapped__(), tvm_ffi.Function)
    assert [p.name.split("-")[0] for p in build.Cache(tmp_path).entries()] == ["dispatch"]


@pytest.mark.skipif(len(WAYS) == 1, reason="no C compiler")
def test_a_cache_that_cannot_be_written_does_not_matter(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "_cache", build.Cache(tmp_path / "file" / "cache"))
    (tmp_path / "file").write_text("")
    assert isinstance(dispatch._in_c.__wrapped__(), tvm_ffi.Function)


@pytest.mark.skipif(len(WAYS) == 1, reason="no C compiler")
def test_the_source_has_no_warnings():
    source = pathlib.Path(dispatch.__file__).with_name("dispatch.c")
    include = tvm_ffi.libinfo.include_paths()
    done = subprocess.run([link.compiler(), "-std=c11", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", str(source),
                           *(f"-I{path}" for path in include)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(len(WAYS) == 1, reason="no C compiler")
def test_kernels_are_held_and_let_go():
    """A dispatcher holds its kernels, and nothing of a call."""
    def note(t):
        seen.append(t.shape)

    seen, x, gone = [], torch.zeros(2, 3, 8), weakref.ref(note)
    first = added(None, tvm_ffi.convert(note), (X,), Shapes({0: 1}, {}))
    run = added(first, tvm_ffi.convert(len), (X.half(),), Shapes({0: 1}, {}))
    before = sys.getrefcount(x)
    del note, first
    run(x)
    assert seen == [(6, 8)] and sys.getrefcount(x) == before and gone() is not None
    del run
    assert gone() is None


def test_a_kernel_of_the_fewest_dimensions_leaves_matrices_to_others(language):
    """Whichever of the two came first."""
    matrix, heads = Kernel(language), Kernel(language)
    apart = torch.zeros(3, 7, 8)[:, :5]  # no stride describes rows of (3, 5)
    run = added(None, heads.run, (apart, None), Shapes({0: 2, 1: 2}, {}, fewest=True))
    run(apart, None)
    assert heads.last() == [facts(apart), None]
    for x in (X, torch.zeros(6, 8), torch.zeros(2, 3, 2, 8)[:, :, 0], torch.zeros(1, 5, 8)):
        with pytest.raises(ValueError, match="dispatcher"):
            run(x, None)
    run = added(run, matrix.run, (X.view(6, 8), None), Shapes({0: 1, 1: 1}, {}))
    run(X, None)
    assert matrix.last() == [facts(X.view(6, 8)), None]
    run(apart, None)
    assert heads.last() == [facts(apart), None]
    both = Kernel(language)  # one of two tensors that must stay as it is is enough
    run = added(None, both.run, (apart, torch.zeros(3, 5, 8)), Shapes({0: 2, 1: 2}, {}, fewest=True))
    y = torch.zeros(3, 5, 8)
    run(apart, y)
    assert both.last() == [facts(apart), facts(y)]
    run(y, apart)
    assert both.last() == [facts(y), facts(apart)]
    with pytest.raises(ValueError, match="dispatcher"):
        run(y, y)


def test_calls_that_it_would_refuse_are_not_added(language):
    kernel = Kernel(language)
    many = torch.zeros(1).expand(1 << 15, (1 << 15) + 1)
    for x in (many, torch.zeros(0, 8)):
        assert added(None, kernel.run, (x,), Shapes({0: 1}, {})) is None
    run = added(None, kernel.run, (X,), Shapes({0: 1}, {}))
    assert added(run, kernel.run, (many,), Shapes({0: 1}, {})) is run
