"""What a consumer of the float8 GEMM does with its sums: scales, bias, activation, and the way out."""
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, const_expr

from .. import tile as tk
from . import epilogue_tile as ep
from .fp8_epilogue import activate, pairs_of, store_e4m3, store_e4m3_elements

OUTPUT_BARRIER = 8  # and one more for each further consumer


class Fp8Out:
    """The methods of ``Fp8Gemm`` by which a tile goes out, panel by panel."""

    crowded = False  # is an activation computed where special functions cost more than plain instructions?

    @cute.jit
    def write(self, g, s: Constexpr, u: Constexpr, t, wg):
        """The tile, panel by panel."""
        x, spec = self.config, self.spec
        if const_expr(not self.bias_ahead):
            self.load_bias(g, u, t)
        if const_expr(spec.scales == "row" and not self.early):
            self.load_row_scales(g, u, t, wg)
        factor = g.scale_a[0] * g.scale_b[0] if const_expr(spec.scales == "tensor") else None
        shrink = cute.arch.rcp_approx(g.out_scale[0]) if const_expr(spec.out == "e4m3") else None
        for i in cutlass.range_constexpr(x.waves * x.n // self.panel):
            self.write_panel(g, s, u, t, i, wg, factor, shrink)

    def write_panel(self, g, s, u, t, i, wg, factor, shrink):
        """factor: of scales per tensor. shrink: one over that of e4m3."""
        x, spec = self.config, self.spec
        first, part, at = i * self.panel % x.n, self.panel_of(u, i), self.place(t, i, wg)
        self.scale(g, u, part, factor, i * self.panel // x.n, first, t)
        self.add_bias(u, part, first)
        activate(part, spec.activation, self.out, self.crowded)
        if spec.out == "e4m3":
            tk.mul(part, part, shrink)
        if spec.store == "tma":
            self.send(g, s, part, t, at, wg, (i % x.panels, x.under_way(i, spec.out)))
        elif spec.out == "e4m3":
            store_e4m3_elements(g.c, part, at[0] * 64, at[1] * self.panel)
        else:
            tk.store_elements(g.c, part, at[0] * 64, at[1] * self.panel)

    def load_bias(self, g, u, t):
        if self.spec.bias is not None:
            ep.load_spread(u.bias, g.bias, t.col * self.config.n)

    def add_bias(self, u, part, first):
        """To columns of the tile from ``first`` on."""
        if self.spec.bias is not None:
            bias = tk.cv(self.panel)
            ep.gather(bias, u.bias, first)
            tk.add_col(part, part, bias)

    def panel_of(self, u, i):
        """Panel i of a consumer's, as a view of its sums."""
        x = self.config
        w, first = i * self.panel // x.n, i * self.panel % x.n
        return tk.columns(u.acc[w * x.split + first // x.part], first % x.part, self.panel)

    def place(self, t, i, wg):
        """Where it lies in C: (row, column) in panels."""
        x = self.config
        each = x.n // self.panel
        return t.row * (x.m // 64) + wg * x.waves + i // each, t.col * each + i % each

    def scale(self, g, u, part, factor, w, first, t):
        if self.spec.scales == "tensor":
            tk.mul(part, part, factor)
        elif self.spec.scales == "row":
            if self.early:
                cols = tk.columns(u.cols, first, self.panel)
            else:
                cols = tk.cv(self.panel)
                tk.load_cols(cols, self.column_scales(g, t), t.col * self.config.n + first, g.n)
            tk.mul_outer(part, part, u.rows[w], cols)

    @cute.jit
    def send(self, g, s: Constexpr, part: Constexpr, t, at, wg, buffers: Constexpr):
        """buffers: (which of the consumer's, how many stores may be under way when it is used again)."""
        buffer, under_way = buffers
        tk.store_wait(under_way)
        self.meet(wg)
        number, panels = wg * self.config.panels + buffer, s.c.stacked(self.stores)
        if const_expr(self.spec.out == "e4m3"):
            store_e4m3(pairs_of(panels)[number], part)
        else:
            tk.store(panels[number], part)
        tk.publish()
        self.meet(wg)
        if const_expr(self.config.by_warp):
            warp = tk.warp_id() % 4
            self.store_panel(g, s.c[4 * number + warp], t, (4 * at[0] + warp, at[1]))
        elif tk.first_warp_of_group():
            self.store_panel(g, s.c[number], t, at)

    def meet(self, wg):
        """Those who write a store's rows."""
        if self.config.by_warp:
            cute.arch.sync_warp()
        else:
            tk.sync(OUTPUT_BARRIER + wg, tk.WARPGROUP)

    def store_panel(self, g, panel, t, at):
        """at: (row, column) in panels."""
        tk.store_async(g.c, panel, at)
