"""The largest |x| of what a thread holds, of rows that lanes share, and of columns.

Words are compared whole, two 16-bit elements or one of fp32: the larger magnitude of each with some sign, NaN where one
is. They are converted in the end, when few are left.
"""
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Uint32
from cutlass.cutlass_dsl import T, dsl_user_op

from ..tile import vectors
from ..tile.assembly import ptx
from ..tile.float8 import nan_max

_KINDS = {cutlass.BFloat16: "bf16x2", cutlass.Float16: "f16x2", cutlass.Float32: "f32"}
_LOWER, _UPPER = 0x5410, 0x7632  # of two words: both lower halves, both upper ones


def of_all(rows):
    """max |v| of register tensors."""
    dtype = rows[0].element_type
    return largest(_elements([_larger_of([word for row in rows for word in _words(row)], dtype)], dtype))


def of_columns(rows):
    """A register tensor of the largest of each column, of rows of as many elements; with some sign."""
    dtype, found = rows[0].element_type, cute.make_rmem_tensor(cute.size(rows[0]), rows[0].element_type)
    for i, column in enumerate(zip(*map(_words, rows))):
        cute.recast_tensor(found, Uint32)[i] = _larger_of(column, dtype)
    return found


def across_lanes(held, offset):
    """The larger ones of a register tensor and of that of the lane `offset` away; with some sign."""
    found = cute.make_rmem_tensor(cute.size(held), held.element_type)
    for i, word in enumerate(_words(held)):
        cute.recast_tensor(found, Uint32)[i] = _from(word, word, offset, held.element_type)
    return found


def of_shared_rows(rows, lane, lanes):
    """max |v| of row lane % len(rows), across `lanes` neighbours that each hold a part of each row.

    At each step a lane holds half of its rows, sends the other half and receives of those that it holds: of 8 rows and
    16 lanes that is 5 shuffles of 16-bit elements, 8 of fp32, where a row after another takes 32.
    """
    dtype = rows[0].element_type
    words = [_larger_of(_words(row), dtype) for row in rows]
    if dtype.width == 16:  # two rows in a word
        half = len(words) // 2
        words = [_larger_of([_halves(a, b, _LOWER), _halves(a, b, _UPPER)], dtype)
                 for a, b in zip(words[:half], words[half:])]
    offset = len(words) // 2
    while offset:
        upper = Boolean(lane & offset != 0)
        own = [cutlass.select_(upper, words[offset + i], words[i]) for i in range(offset)]
        sent = [cutlass.select_(upper, words[i], words[offset + i]) for i in range(offset)]
        words = [_from(k, s, offset, dtype) for k, s in zip(own, sent)]
        offset //= 2
    word, offset = words[0], len(rows) * dtype.width // 32  # of 16 bits, neighbours so far away have the same words
    while offset < lanes:
        word, offset = _from(word, word, offset, dtype), 2 * offset
    found = _elements([word], dtype)
    if dtype.width == 16:
        found = [cutlass.select_(Boolean(lane & len(rows) // 2 != 0), found[1], found[0])]
    return largest(found)


def magnitudes(held):
    """|v| of each element, fp32."""
    return [largest([v]) for v in vectors.wide(held)]


def largest(values):
    """max |v|; NaN where one is."""
    found = None
    for v in values:
        v = cute.arch.fmax(v, -v, nan=True)
        found = v if found is None else nan_max(found, v)
    return found


def of_lanes(value, offsets):
    """The largest of what lanes so far away from each other hold, none of them negative."""
    for offset in offsets:
        value = nan_max(value, cute.arch.shuffle_sync_bfly(value, offset=offset))
    return value


def _words(held):
    words = cute.recast_tensor(held, Uint32)
    return [words[i] for i in range(cute.size(words))]


def _elements(words, dtype):
    held = cute.make_rmem_tensor(len(words) * 32 // dtype.width, dtype)
    for i, word in enumerate(words):
        cute.recast_tensor(held, Uint32)[i] = word
    return vectors.wide(held)


def _from(word, sent, offset, dtype):
    """The larger of a word and of what the lane `offset` away sends."""
    return _larger_of([word, cute.arch.shuffle_sync_bfly(sent, offset=offset)], dtype)


def _larger_of(words, dtype):
    found = words[0]
    for word in words[1:]:
        found = _larger(found, word, _KINDS[dtype])
    return found


def _halves(a, b, which):
    return Uint32(cute.arch.prmt(a, b, which))


@dsl_user_op
def _larger(a, b, kind, *, loc=None, ip=None):
    """The larger magnitudes of two words' elements, NaN where one is; with some sign."""
    return Uint32(ptx([Uint32(a), Uint32(b)], f"max.NaN.xorsign.abs.{kind} $0, $1, $2;", "=r,r,r", loc, ip, T.i32(),
                      pure=True))
