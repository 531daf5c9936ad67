"""Shared tiles and global memory: a warpgroup's stores and loads, TMA of every rank, multicast, bulk copies."""
import pytest
import torch

from tests.helpers.sanitizer.guard_pages import guarded
from tests.helpers.tile import cases
from tests.helpers.tile.run import DTYPES, bits, normal, poisoned, run, same, small_ints


@pytest.mark.parametrize("cols,src,dst,swizzle,transposed", cases.ROUND_TRIPS)
@pytest.mark.sampled(when=lambda cols, src, dst, swizzle, transposed: cases.ROUND_TRIPS.index(
    (cols, src, dst, swizzle, transposed)) % 3 != 1)
def test_store_and_load(cols, src, dst, swizzle, transposed):
    x = normal(src, 64, cols)
    stored = poisoned(dst, *((cols, 64) if transposed else (64, cols)))
    loaded = poisoned(dst, 64, cols)
    run("transfer:build_round_trip", (cols, src, dst, swizzle, transposed), x, stored, loaded)
    expected = x.to(DTYPES[dst])
    same(stored, expected.t().contiguous() if transposed else expected, "stored")
    same(loaded, expected, "loaded")


def test_stacked():
    x, y = normal("fp32", 128, 32), poisoned("fp32", 128, 32)
    run("transfer:build_stacked", (32,), x, y)
    same(y, x + 1.0)


@pytest.mark.parametrize("cols", (64, 192))
def test_panels(cols):
    x, y, z = normal("bf16", 64, cols), poisoned("bf16", 64, cols), poisoned("bf16", 64, cols)
    run("transfer:build_panels", (cols,), x, y, z)
    same(z, x, "loaded")
    same(y, torch.cat(x.split(64, 1)[::-1], 1), "stored")


def up(n, step):
    return -(-n // step) * step


def surrounded(make, dtype, shape, **seed):
    """(storage, its part of ``shape``): two rows more, and rows longer by more than the next 16 bytes."""
    *outer, rows, cols = shape
    storage = make(dtype, *outer, rows + 2, up(cols, 16) + 16, **seed)
    return storage, storage[..., :rows, :cols]


def sizes(rank, rows, cols):
    """Whole tiles, one element more and fewer, a part of one tile."""
    outer = ((), (3,), (2, 3))[rank - 2]
    for r, c in ((2 * rows, 2 * cols), (2 * rows + 1, cols + 1), (3 * rows - 1, 2 * cols - 3), (rows // 2 + 1, 5)):
        yield (*outer, r, c)


@pytest.mark.parametrize("dtype,rank,rows,cols,swizzle,add", cases.TMA_COPIES)
def test_tma_store(dtype, rank, rows, cols, swizzle, add):
    """Whole tiles of x to a y that ends before: exact inside; TMA may write on to the next 16 bytes, and no further."""
    for shape in sizes(rank, rows, cols):
        *outer, r, c = shape
        x = small_ints(dtype, *outer, up(r, rows), up(c, cols))
        storage, y = surrounded(small_ints, dtype, shape, seed=1) if add else surrounded(poisoned, dtype, shape)
        expected, inside = storage.clone(), (..., slice(r), slice(c))
        if add:
            expected[inside] += x[inside]
        else:
            bits(expected)[inside] = bits(x)[inside]
        run("memory:build_tma", (dtype, rank, rows, cols, swizzle, add), x, y)
        scratch = (..., slice(r), slice(c, up(c, 16 // x.element_size())))
        bits(expected)[scratch] = bits(storage)[scratch]
        same(storage, expected, f"store to {shape} of {tuple(storage.shape)}")


@pytest.mark.parametrize("dtype,rank,rows,cols,swizzle", [x[:-1] for x in cases.TMA_COPIES if not x[-1]])
def test_tma_load(dtype, rank, rows, cols, swizzle):
    """An x between NaN, that ends inside its last tiles, to whole tiles of y: zeros beyond, to the element."""
    for shape in sizes(rank, rows, cols):
        *outer, r, c = shape
        storage, x = surrounded(poisoned, dtype, shape)
        bits(storage)[..., :r, :c] = bits(small_ints(dtype, *shape))
        y = poisoned(dtype, *outer, up(r, rows), up(c, cols))
        expected = torch.zeros_like(bits(y))
        expected[..., :r, :c] = bits(storage)[..., :r, :c]
        run("memory:build_tma", (dtype, rank, rows, cols, swizzle, False), x, y)
        wrong = (bits(y) != expected).reshape(-1, *y.shape[-2:]).any(0)
        at_rows, at_cols = (wrong.any(d).nonzero().flatten().tolist() for d in (1, 0))
        assert not wrong.any(), (f"load of {shape}: {'wrong inside' if wrong[:r, :c].any() else 'right inside'}, "
                                 f"not zero beyond in columns {at_cols} of rows {at_rows}")


@pytest.mark.parametrize("rows,cols,pack", cases.PIECES)
def test_pieces_of_rows(rows, cols, pack):
    """A piece of packed rows, anywhere in a tensor that is NaN around it: nothing else is written, nor, where heads are
    not packed, read."""
    heads, total = 2 * pack, 300
    per_tile = rows // pack  # rows of each head
    for first, size in ((0, 1), (0, total), (0, per_tile), (7, per_tile - 1), (100, 3 * per_tile + 1), (total - 1, 1),
                        (33, 0), (total, 0)):
        x, y = poisoned("bf16", total, heads, cols), poisoned("bf16", total, heads, cols)
        x[first:first + size] = normal("bf16", size, heads, cols)
        tiles = max(-(-size // per_tile), 1)
        seen = poisoned("bf16", tiles, 2, rows, cols)
        run("memory:build_pieces", (rows, cols, pack), x, y, seen, first, size)
        same(y, x, f"{size} rows from {first}")
        inside = torch.zeros(tiles * per_tile, heads, cols, device="cuda", dtype=x.dtype)
        loaded = x[first:first + size] if pack == 1 else x[first:first + len(inside)]
        inside[:len(loaded)] = loaded
        inside = inside.view(tiles, per_tile, 2, pack, cols).transpose(1, 2).reshape(tiles, 2, rows, cols)
        same(seen, inside, f"tiles of {size} rows from {first}")


@pytest.mark.parametrize("rows,cols,box", cases.PAGES)
def test_pages_in_groups_of_rows(rows, cols, box):
    """Products of a tile whose boxes come from pages that lie apart, in any order, and of what is in front of them:
    zeros. Around the pages is NaN."""
    page, pages = 3 * box, 7
    x = poisoned("bf16", pages, page + 8, 3, cols)[:, :page]
    x[:, :, 1] = small_ints("bf16", pages, page, cols)
    first = [(i * 4 % pages, i % 3) for i in range(rows // box)]  # page, box of it
    at = [(p, b * box // 8) for p, b in first]
    at[2] = 0, -box // 8
    tile = torch.cat([x[p, b * box:(b + 1) * box, 1] for p, b in first])
    tile[2 * box:3 * box] = 0
    a, c = small_ints("bf16", 64, cols, seed=1), small_ints("bf16", 64, rows, seed=2)
    d, e = poisoned("fp32", 64, rows), poisoned("fp32", 64, cols)
    run("pages:build", (rows, cols, box), x, torch.tensor(at, device="cuda", dtype=torch.int32), a, c, d, e)
    assert torch.equal(d.double(), a.double() @ tile.double().t())
    assert torch.equal(e.double(), c.double() @ tile.double())


@pytest.mark.parametrize("where", ("front", "end"))
def test_pieces_of_rows_touch_nothing_outside(where):
    """TMA loads also read where a tensor begins, whatever their coordinates: it must not begin in front of memory."""
    rows, cols, pack = cases.PIECES[0]
    for total, first, size in ((4096, 4000, 96), (4096, 5, 1), (4096, 4096, 0), (300, 7, 100), (1, 0, 1)):
        x, y = (guarded(normal("bf16", total, 2, cols, seed=i), where) for i in range(2))
        expected = y.clone()
        expected[first:first + size] = x[first:first + size]
        seen = guarded(poisoned("bf16", max(up(size, rows), rows) // rows, 2, rows, cols), where)
        run("memory:build_pieces", (rows, cols, pack), x, y, seen, first, size)
        same(y, expected, f"{size} rows from {first}")


@pytest.mark.parametrize("dtype,rows,cols,cluster,stages", cases.MULTICASTS)
def test_multicast(dtype, rows, cols, cluster, stages):
    for n in (rows, 7 * rows, 20 * rows + 3):
        x, y = normal(dtype, n, cols), poisoned(dtype, cluster, n, cols)
        run("memory:build_multicast", (dtype, rows, cols, cluster, stages), x, y)
        for block in range(cluster):
            same(y[block], x, f"block {block} of {cluster}, {n} rows")


@pytest.mark.parametrize("options", cases.BULK)
def test_bulk(options):
    n = options[0]
    x, y, z, w = normal("fp32", n), poisoned("fp32", n), normal("fp32", n, seed=1), normal("fp32", 512, seed=2)
    counter, counts = torch.zeros(1, dtype=torch.int32, device="cuda"), poisoned("int32", 128)
    added = z + (x + 1.0)
    pattern = torch.tensor([1.0, 2.0, 3.0, 4.0], device="cuda").repeat(128)
    expected_w = (w + pattern) + pattern
    run("memory:build_bulk", options, (x, y, z, w, counter, counts))
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
