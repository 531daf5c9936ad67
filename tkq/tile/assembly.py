"""PTX where the DSL has no operation for it: the one file that imports the DSL's private modules, whose places may
change between its versions."""
from cutlass import Float32, Int32, Int64
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


def ptx(args, text, constraints, loc, ip, result=None, *, pure=False):
    """The instructions ``text``, in which $0, $1.. are the result, if there is one, and the arguments.

    args: values of the DSL, already of the types that the instructions take. constraints: of result and arguments, as
    LLVM writes them ("=r,f,f"). result: an MLIR type, None where there is none. pure: without side effects: may be
    moved, merged, or left out where the result is not used.
    """
    return llvm.inline_asm(result, [x.ir_value(loc=loc, ip=ip) for x in args], text, constraints,
                           has_side_effects=not pure, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc,
                           ip=ip)


def ptx_several(args, text, constraints, loc, ip, results, *, pure=False):
    """``ptx`` with several results, of these MLIR types: a list of them."""
    found = ptx(args, text, constraints, loc, ip, llvm.StructType.get_literal(results), pure=pure)
    return [llvm.extractvalue(kind, found, [i], loc=loc, ip=ip) for i, kind in enumerate(results)]


def traced_block():
    """The MLIR block that instructions are being added to."""
    return ir.InsertionPoint.current.block


@dsl_user_op
def opaque_sum(a: Int64, b: Int64, *, loc=None, ip=None) -> Int64:
    """a + b, of which the compiler knows nothing: a sum that it sees in a loop it makes anew of the loop's counter."""
    return Int64(ptx((a, b), "add.s64 $0, $1, $2;", "=l,l,l", loc, ip, T.i64()))


@dsl_user_op
def made_here(x, *, loc=None, ip=None):
    """x, an Int32 or Float32, which the compiler makes by now: it moves sums down to where they are used, past
    branches, and keeps what they are made of in registers until then."""
    whole = isinstance(x, Int32)
    text, kind, of = ("=r,r", T.i32(), Int32) if whole else ("=f,f", T.f32(), Float32)
    return of(ptx((x,), "mov.b32 $0, $1;", text, loc, ip, kind))


@dsl_user_op
def bit_if_equal(bits: Int32, n: int, a: Float32, b: Float32, *, loc=None, ip=None) -> Int32:
    """bits, with bit n where a == b: two instructions."""
    text = f"{{ .reg .pred p; setp.eq.f32 p, $2, $3; mov.b32 $0, $1; @p or.b32 $0, $0, {1 << n}; }}"
    return Int32(ptx((bits, a, b), text, "=r,r,f,f", loc, ip, T.i32(), pure=True))


@dsl_user_op
def product_toward_zero(a: Float32, b: Float32, *, loc=None, ip=None) -> Float32:
    """a b, rounded toward 0: of finite numbers it is finite, beyond fp32 the largest one."""
    return Float32(ptx((a, b), "mul.rz.f32 $0, $1, $2;", "=f,f,f", loc, ip, T.f32(), pure=True))


@dsl_user_op
def fma_toward_zero(a: Float32, b: Float32, c: Float32, *, loc=None, ip=None) -> Float32:
    """a b + c, rounded once, toward 0. c = -product_toward_zero(a, b): what that has left out, exactly, barring
    underflow and overflow."""
    return Float32(ptx((a, b, c), "fma.rz.f32 $0, $1, $2, $3;", "=f,f,f,f", loc, ip, T.f32(), pure=True))
