"""Fragments of mma.sync that come straight from memory: e4m3 in registers, the first operand of a product in fp16."""
from cutlass import Float32, Int32, Int64
from cutlass.cutlass_dsl import T, dsl_user_op

from tkq.tile.assembly import ptx, ptx_several

WORD = 4  # bytes
EARLIER, LATER = 0x5140, 0x7362  # selectors of `pairs`: bytes 0 and 1 of each of two words, or 2 and 3


@dsl_user_op
def load_words(src, offset, there, held, *, loc=None, ip=None):
    """1, 2 or 4 words from the global address ``src`` and ``offset`` bytes, a number known when compiled, past L1;
    ``held``, what they replace, where ``there`` is 0. Any thread. It stays where it is written."""
    n = len(held)
    args = [Int64(src), Int32(there), *(Int32(x) for x in held)]
    to, constraints = ", ".join(f"${i}" for i in range(n)), ",".join(["=&r"] * n + ["l", "r"] + ["r"] * n)
    kind, to = ("", to) if n == 1 else (f".v{n}", f"{{{to}}}")
    keep = " ".join(f"mov.b32 ${i}, ${i + n + 2};" for i in range(n))
    text = (f"{{ .reg .pred p; setp.ne.b32 p, ${n + 1}, 0; {keep} "
            f"@p ld.global.L1::no_allocate.L2::128B{kind}.b32 {to}, [${n}+{offset}]; }}")
    if n == 1:
        return [Int32(ptx(args, text, constraints, loc, ip, T.i32()))]
    found = ptx_several(args, text, constraints, loc, ip, [T.i32()] * n)
    return [Int32(word) for word in found]


@dsl_user_op
def mma(c, a, b, *, loc=None, ip=None):
    """c + A @ B, 16 x 8, of 16 x 16 and 16 x 8 in fp16. A whole warp, lane 4 * g + t.

    a: words of rows g, g + 8, g, g + 8: columns 2t and 2t + 1, those for the last two plus 8. b: of rows as a's
    columns, column g. c: four fp32, rows g and g + 8 of columns 2t and 2t + 1."""
    found = ptx_several(
        [*(Int32(x) for x in a), *(Int32(x) for x in b), *(Float32(x) for x in c)],
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, "
        "{$10, $11, $12, $13};", "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", loc, ip, [T.f32()] * 4, pure=True)
    return [Float32(x) for x in found]


@dsl_user_op
def transposed(word, *, loc=None, ip=None):
    """An 8 x 8 tile of 16 bits, two of a row to a lane, transposed. A whole warp."""
    return Int32(ptx([Int32(word)], "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", loc, ip, T.i32()))


@dsl_user_op
def pairs(low, high, selector, *, loc=None, ip=None):
    """Bytes of two words by turns, of low first: ``selector`` says which two of each."""
    return Int32(ptx([Int32(low), Int32(high)], f"prmt.b32 $0, $1, $2, {selector};", "=r,r,r", loc, ip, T.i32(),
                     pure=True))
