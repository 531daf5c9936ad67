"""PTX where the DSL has no operation for it."""
from cutlass import Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


def _asm(args, text, constraints, loc, ip, result=None):
    return llvm.inline_asm(result, [x.ir_value(loc=loc, ip=ip) for x in args], text, constraints, has_side_effects=True,
                           is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip)


@dsl_user_op
def opaque_sum(a: Int64, b: Int64, *, loc=None, ip=None) -> Int64:
    """a + b, of which the compiler knows nothing: a sum that it sees in a loop it makes anew of the loop's counter."""
    return Int64(_asm((a, b), "add.s64 $0, $1, $2;", "=l,l,l", loc, ip, T.i64()))
