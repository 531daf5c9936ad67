"""Complex numbers of two fp16 words, and how the rows of 8 x 8 matrices go to places of their own."""
from cutlass import Float16, Float32, Int32
from cutlass.cutlass_dsl import dsl_user_op

from .assembly import ptx
from .maps import _cvt2
from .register import RegTile
from .woven import _Fp16, _numbers, _words


def complex_times(x, by, conjugate=False):
    """x * by, or by its conjugate: each (real parts, imaginary parts), words of two fp16 numbers; in fp16."""
    return _Fp16.times(*x, *by, conjugate)


def narrow_words(a: RegTile):
    """The words of an fp32 tile rounded to fp16: of two neighbours each, 2 j + r those of a thread's row r in block j
    of 8 columns."""
    if not isinstance(a, RegTile) or a.dtype is not Float32:
        raise TypeError(f"narrow_words: operand a is {a}, allowed is an fp32 register tile")
    return [_cvt2(a.tensor[2 * i], a.tensor[2 * i + 1], Float16) for i in range(a.cols // 4)]


def numbers(word):
    """The two of a word, fp32."""
    return _numbers(word)


def fill_words(dst: RegTile, words):
    """dst, fp16 = such words."""
    if not isinstance(dst, RegTile) or dst.dtype is not Float16 or dst.cols // 4 != len(words):
        raise TypeError(f"fill_words: dst is {dst}, allowed with {len(words)} words is an fp16 register tile of "
                        f"{4 * len(words)} columns")
    to = _words(dst)
    for i, word in enumerate(words):
        to[i] = word


@dsl_user_op
def store_matrices(address: Int32, a: Int32, b: Int32, c: Int32, d: Int32, *, loc=None, ip=None):
    """Four matrices of 8 x 8 fp16 numbers, a word of each of a warp's lanes, to shared memory. address: where lane 8 m
    + r wants row r of matrix m, 16 bytes. A warp together."""
    ptx([Int32(x) for x in (address, a, b, c, d)],
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};", "r,r,r,r,r,~{memory}", loc, ip)
