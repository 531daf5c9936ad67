"""A rest between two looks at what others count: each look takes L2's time, and empties L1."""
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

REST = 500  # nanoseconds


@dsl_user_op
def rest(*, loc=None, ip=None):
    llvm.inline_asm(None, [], f"nanosleep.u32 {REST};", "", has_side_effects=True, is_align_stack=False,
                    asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip)
