"""Scans along contiguous tokens: what the lanes of a warp tell each other, by numpy arrays of their numbers."""
from types import SimpleNamespace

import numpy
import pytest
import torch

from tests.helpers.emulation import warp
from tkq.recurrence import lines, products
from tkq.recurrence.config import ScanConfig
from tkq.recurrence.spec import ScanSpec
from tkq.reference import recurrence as reference

V, PIECES = 2, 2


def shuffled(x, lane):
    return numpy.broadcast_to(x, warp.LANES)[lane]


@pytest.fixture
def kernel(request, monkeypatch):
    """A `LineScan` with `lanes` lanes a line, forward or backward."""
    lanes, backward = request.param
    spec = ScanSpec("fp32", V, "time", gradients="both" if backward else None)
    made = lines.LineScan(spec, ScanConfig(V * PIECES, 1, lanes=lanes))
    warp.instead_of_the_dsl(monkeypatch, lines)
    arch = SimpleNamespace(shuffle_sync=shuffled, shuffle_sync_up=warp.shifted_up)
    math = SimpleNamespace(fma=lambda a, b, c: a * b + c)
    for module in (lines, products):
        monkeypatch.setattr(module, "cute", SimpleNamespace(arch=arch, math=math))
        monkeypatch.setattr(module, "Float32", float)
    monkeypatch.setattr(lines, "cutlass", SimpleNamespace(select_=numpy.where))
    monkeypatch.setattr(products.assembly, "product_toward_zero", lambda a, b: a * b)
    monkeypatch.setattr(products.assembly, "fma_toward_zero", lambda a, b, c: a * b + c)
    monkeypatch.setattr(lines.LineScan, "numbers", lambda self, held: held)
    return made


@pytest.mark.parametrize("kernel", [(lanes, way) for lanes in (4, 32) for way in (False, True)], indirect=True)
def test_a_run(kernel):
    """Tokens in the scan's order, of the lines of one warp; the state that comes in is one of each line."""
    torch.manual_seed(0)
    made = lambda *size: torch.randn(size, dtype=torch.float64).numpy()
    L, N, T = kernel.lanes, kernel.lines, kernel.tokens
    of = SimpleNamespace(lane=numpy.arange(warp.LANES) % L)
    a, b, h, state, edge = made(N, T), made(N, T), made(N, T), made(N), made(N)
    held = lambda x: [[x.reshape(N, PIECES, L, V)[:, i, :, j].ravel() for j in range(V)] for i in range(PIECES)]
    pieces = [kernel.piece(None, x, y, of) for x, y in zip(held(a), held(b))]
    coming = kernel.coming(pieces, [state.repeat(L)])
    found = [(lines.slopes if kernel.spec.backward else lines.states)(
        piece.a, kernel.into_lane(piece.up_to, x.value, of), piece.b) for piece, x in zip(pieces, coming)]
    back = lambda x: numpy.stack([numpy.stack(of, -1).reshape(N, L, V) for of in x], 1).reshape(N, T)
    line = lambda x: torch.from_numpy(x)[..., None]
    if kernel.spec.backward:  # the reference goes from the last token to the first
        flipped = [line(x[:, ::-1].copy()) for x in (b, a, h)]
        wanted = reference.scan_backward(flipped[0], line(state), flipped[1], flipped[2], None, False)
        values, left = wanted[1].flip(1)[..., 0], wanted[2][:, 0]
        following = numpy.concatenate([h[:, 1:], edge[:, None]], 1)
        numpy.testing.assert_array_equal(back(kernel.earlier(held(h), edge.repeat(L), of)), following)
    else:
        values, left = (x[..., 0] for x in reference.scan(line(a), line(b), line(state), False))
    numpy.testing.assert_allclose(back([x for x, _ in found]), values, rtol=1e-9, atol=1e-9)
    numpy.testing.assert_allclose(coming[-1].value.reshape(N, L), left[:, None].expand(N, L), rtol=1e-9, atol=1e-9)
    numpy.testing.assert_allclose(found[-1][1].reshape(N, L)[:, -1], left, rtol=1e-9, atol=1e-9)


def toward_zero(x):
    found = numpy.float32(x)
    return numpy.nextafter(found, numpy.float32(0)) if abs(numpy.float64(found)) > abs(x) else found


@pytest.mark.parametrize("factor", [0.9997, -0.9993, 1.003])
def test_products_are_exact(monkeypatch, factor):
    """Of 512 equal factors by two numbers, rounded as the GPU does; one is off by some hundred roundings."""
    double = numpy.float64
    assembly = products.assembly
    monkeypatch.setattr(assembly, "product_toward_zero", lambda a, b: toward_zero(double(a) * double(b)))
    monkeypatch.setattr(assembly, "fma_toward_zero", lambda a, b, c: toward_zero(double(a) * double(b) + double(c)))
    monkeypatch.setattr(products, "Float32", numpy.float32)
    factor = numpy.float32(factor)
    off = []
    for parts in (1, 2):
        product = products.of([factor] * 4, parts)
        for _ in range(7):
            product = products.times(product, product, parts)
        off.append(abs(sum(map(double, product)) / double(factor) ** 512 - 1))
    assert off[1] < 1e-9 and off[0] > 1e-5
