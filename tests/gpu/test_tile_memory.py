"""Shared tiles and global memory: a warpgroup's stores and loads, TMA of every rank, multicast, bulk copies."""
import pytest
import torch

from tests import tile_cases as cases
from tests.tile_run import DTYPES, normal, poisoned, run, same, small_ints


@pytest.mark.parametrize("cols,src,dst,swizzle,transposed", cases.ROUND_TRIPS)
def test_store_and_load(cols, src, dst, swizzle, transposed):
    x = normal(src, 64, cols)
    stored = poisoned(dst, *((cols, 64) if transposed else (64, cols)))
    loaded = poisoned(dst, 64, cols)
    run("transfer:build_round_trip", (cols, src, dst, swizzle, transposed), x, stored, loaded)
    expected = x.to(DTYPES[dst])
    same(stored, expected.t().contiguous() if transposed else expected, "stored")
    if not transposed:
        same(loaded, expected, "loaded")


def test_stacked():
    x, y = normal("fp32", 128, 32), poisoned("fp32", 128, 32)
    run("transfer:build_stacked", (32,), x, y)
    same(y, x + 1.0)


def padded(make, dtype, shape, **seed):
    """(storage, view of ``shape``): rows padded to a multiple of 16 elements and by 16 more."""
    storage = make(dtype, *shape[:-1], (shape[-1] + 15) // 16 * 16 + 16, **seed)
    return storage, storage[..., :shape[-1]]


def sizes(rank, rows, cols):
    """Whole tiles, one element more and fewer, a part of one tile."""
    outer = ((), (3,), (2, 3))[rank - 2]
    for r, c in ((2 * rows, 2 * cols), (2 * rows + 1, cols + 1), (3 * rows - 1, 2 * cols - 3), (rows // 2 + 1, 5)):
        yield (*outer, r, c)


@pytest.mark.parametrize("dtype,rank,rows,cols,swizzle,add", cases.TMA_COPIES)
def test_tma(dtype, rank, rows, cols, swizzle, add):
    for shape in sizes(rank, rows, cols):
        _, x = padded(small_ints, dtype, shape)
        storage, y = padded(small_ints if add else poisoned, dtype, shape, **(dict(seed=1) if add else {}))
        expected = storage.clone()
        if add:
            expected[..., :shape[-1]] += x
        else:
            expected.view(torch.uint8)[..., :shape[-1] * x.element_size()] = x.contiguous().view(torch.uint8)
        run("memory:build_tma", (dtype, rank, rows, cols, swizzle, add), x, y)
        same(storage, expected, str(shape))  # the padding too: nothing is written past the end


@pytest.mark.parametrize("dtype,rows,cols,cluster,stages", cases.MULTICASTS)
def test_multicast(dtype, rows, cols, cluster, stages):
    for n in (rows, 7 * rows, 20 * rows + 3):
        x, y = normal(dtype, n, cols), poisoned(dtype, cluster, n, cols)
        run("memory:build_multicast", (dtype, rows, cols, cluster, stages), x, y)
        for block in range(cluster):
            same(y[block], x, f"block {block} of {cluster}, {n} rows")


def test_bulk():
    n = 1024
    x, y, z, w = normal("fp32", n), poisoned("fp32", n), normal("fp32", n, seed=1), normal("fp32", 512, seed=2)
    counter, counts = torch.zeros(1, dtype=torch.int32, device="cuda"), poisoned("int32", 128)
    added = z + (x + 1.0)
    pattern = torch.tensor([1.0, 2.0, 3.0, 4.0], device="cuda").repeat(128)
    expected_w = (w + pattern) + pattern
    run("memory:build_bulk", (n,), (x, y, z, w, counter, counts))
    same(y, x + 1.0, "bulk_load, bulk_store")
    same(z, added, "bulk_add")
    same(w, expected_w, "red_add4")
    assert sorted(counts.tolist()) == sorted([*range(100), *range(28)]) and counter.item() == 28


@pytest.mark.parametrize("stages", (1, 3))
@pytest.mark.parametrize("n", (1, 2, 50))
def test_copy_async(stages, n):
    for x in (normal("fp32", n, 32), normal("fp32", 32, n).t(), normal("fp32", n, 100)[:, 3:99:3]):
        y = poisoned("fp32", n, 32)
        run("memory:build_copy_async", (stages,), (x, y))
        same(y, x * 2.0)


@pytest.mark.parametrize("dtype,rows,cols,threads", cases.ELEMENTS)
def test_load_elements(dtype, rows, cols, threads):
    n, m = 2 * rows - 3, cols + 5
    for x in (small_ints(dtype, n, m), small_ints(dtype, m, n).t(), small_ints(dtype, n + 1, 2 * m + 1)[1:, 1::2]):
        for row0, col0 in ((0, 0), (rows, 3), (rows - 1, cols), (5 * rows, 0)):
            y, expected = poisoned(dtype, rows, cols), torch.zeros(rows, cols, device="cuda")
            part = x.float()[row0:row0 + rows, col0:col0 + cols]
            expected[:part.shape[0], :part.shape[1]] = part
            run("memory:build_elements", (dtype, rows, cols, threads), x, y, row0, col0)
            assert torch.equal(y.float(), expected), f"at {row0}, {col0}"
