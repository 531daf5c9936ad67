"""PTX where the DSL has no operation for it."""
from cutlass._mlir.dialects import llvm


def _asm(args, text, constraints, loc, ip, result=None):
    return llvm.inline_asm(result, [x.ir_value(loc=loc, ip=ip) for x in args], text, constraints, has_side_effects=True,
                           is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip)
