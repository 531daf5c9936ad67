"""What a warpgroup's products cost it: clocks of each phase of a step, one or two warpgroups on a processor."""
import os, sys
os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op
import tkq.tile as tk
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

PHASES = ("S issue", "PV issue", "wait S", "maxima", "exps", "wait PV", "convert")
STEPS = 64


@dsl_user_op
def clock(after, *, loc=None, ip=None):
    """The clock, read when ``after`` is known."""
    return Int32(llvm.inline_asm(
        T.i32(), [Float32(after).ir_value(loc=loc, ip=ip)],
        "{ .reg .pred p; setp.neu.f32 p, $1, 0f7F7FFFF3; mov.u32 $0, 0; @p mov.u32 $0, %clock; }", "=r,f",
        has_side_effects=True, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip))


class Probe:
    def __init__(self, groups, late, pv, softmax, kv=128):
        self.groups, self.late, self.pv, self.softmax, self.kv = groups, late, pv, softmax, kv

    @cute.jit
    def __call__(self, out: cute.Tensor, scale: Float32, stream: cuda.CUstream):
        self.kernel(out, scale).launch(grid=[1, 1, 1], block=[128 * self.groups, 1, 1], stream=stream, max_number_threads=[128 * self.groups, 1, 1], min_blocks_per_mp=1)

    @cute.kernel
    def kernel(self, out: cute.Tensor, scale: Float32):
        al = tk.SharedAllocator()
        q, k, v = al.tile(tk.st(64, 128), self.groups), al.tile(tk.st(self.kv, 128), 2), al.tile(tk.st(self.kv, 128), 2)
        tk.init_block(lambda: None)
        wg = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 128)
        att, p, o, norm, top = tk.rt_fl(self.kv), tk.rt_bf(self.kv), tk.rt_fl(128), tk.rv(), tk.rv()
        sums = cute.make_rmem_tensor((len(PHASES) + 1,), Int32)
        for j in cutlass.range_constexpr(len(PHASES) + 1):
            sums[j] = Int32(0)
        tk.zero(o); tk.zero(norm); tk.fill(att, scale); tk.copy(p, att); tk.zero(top)
        begin = clock(scale)
        for i in cutlass.range(STEPS, unroll=1):
            t = [clock(scale)]
            tk.mm_ABt(att, q[wg], k[i % 2])
            t.append(clock(scale))
            if const_expr(self.pv):
                tk.mma_AB(o, p, v[i % 2])
            t.append(clock(scale))
            tk.mma_wait(1 if self.pv else 0)
            t.append(clock(att.rows_view[0, 0]))
            if const_expr(self.softmax):
                tk.row_max(top, att)
            t.append(clock(top.tensor[0] + top.tensor[1]))
            if const_expr(self.late):
                self.exps(att, norm, scale)
                t.append(clock(norm.tensor[0] + norm.tensor[1]))
                tk.mma_wait(0)
                t.append(clock(scale))
            else:
                t.append(clock(scale))
                tk.mma_wait(0)
                t.append(clock(scale))
                self.exps(att, norm, scale)
            tk.copy(p, att)
            t.append(clock(norm.tensor[0] + norm.tensor[1]))
            for j in cutlass.range_constexpr(len(PHASES)):
                sums[j] = sums[j] + t[j + 1] - t[j]
        sums[len(PHASES)] = clock(scale) - begin
        tk.mma_wait(0)
        total = tk.rv()
        tk.row_sum(total, o)
        if cute.arch.thread_idx()[0] % 128 == 0:
            for j in cutlass.range_constexpr(len(PHASES) + 1):
                out[wg, j] = Float32(sums[j])
            out[wg, len(PHASES) + 1] = total.tensor[0] + norm.tensor[0]

    def exps(self, att, norm, scale):
        if self.softmax:
            tk.mul(att, att, scale)
            tk.exp2(att, att)
            tk.row_sum_partial(norm, att, norm)


FORMS = {f"{g} groups, {what}": (g, *flags) for g in (1, 2) for what, flags in {
    "S": (False, False, False), "S PV": (False, True, False), "S PV softmax": (False, True, True),
    "S PV softmax late wait": (True, True, True), "S softmax": (True, False, True)}.items()}


def compiled(form):
    out = make_fake_compact_tensor(Float32, (2, len(PHASES) + 2), stride_order=(1, 0), assumed_align=16)
    return cute.compile(Probe(*form), out, Float32(0), make_fake_stream(use_tvm_ffi_env_stream=True),
                        options="--enable-tvm-ffi remarks{ptx}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        c = compiled(FORMS[sys.argv[1]])
        c.export_to_c(sys.argv[2], function_name="k")
    else:
        import torch
        for name, form in FORMS.items():
            out = torch.zeros(2, len(PHASES) + 2, device="cuda")
            f = compiled(form)
            for _ in range(3):
                f(out, 0.001)
            torch.cuda.synchronize()
            for w in range(form[0]):
                x = (out[w] / STEPS).tolist()
                print(f"{name:32s} wg {w}: step {x[len(PHASES)]:7.0f}  " + "  ".join(f"{n} {y:.0f}" for n, y in zip(PHASES, x)), flush=True)
