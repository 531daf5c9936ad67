"""The epilogue of the 16-bit GEMM: from a consumer's accumulator to the result in memory."""
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr

from ... import tile as tk
from ..epilogue import registers as ep
from . import operands
from .config import BUFFERS, Config
from .put_rows import put_rows
from .spec import GemmSpec
from .state import Tiles

OUTPUT_BARRIER = 8  # and one more for each further consumer


class Epilogue:
    """f(alpha * a @ b + beta * c + bias), subtile by subtile (``n_stores`` of a tile, each of ``store_n`` columns), and
    its way out: by TMA, by rows or by elements.

    A subtile goes through one of a consumer's BUFFERS in shared memory: its own named barrier twice a subtile (written
    by all, sent by one warp), TMA's own count of stores in flight for using a buffer again."""

    def __init__(self, spec: GemmSpec, config: Config, tiles: Tiles):
        self.spec, self.config, self.tiles = spec, config, tiles

    def place(self, t, i, wg) -> ep.Place:
        """Of a subtile of the result, for this consumer."""
        row, col = t.row * self.config.consumers + wg, t.col * self.tiles.n_stores + i
        return ep.Place(row * 64, col * self.tiles.store_n)

    def fetch(self, g, u, t, wg):
        """What the tile's epilogue will need, on its way while the products run."""
        if self.spec.epilogue.bias:
            for part, v in enumerate(u.bias):
                bias = g.inputs.bias[None, part] if self.tiles.parts == 2 else g.inputs.bias
                ep.load_lane_cols(v, bias, t.col * (self.tiles.n_stores * self.tiles.store_n))
        if self.spec.epilogue.residual and self.config.hold_in_registers:
            for i, subtile in enumerate(u.pending):
                self.load_residual(g, subtile, t, i, wg)

    def load_residual(self, g, dst, t, i, wg):
        c = operands.of_batch(g.inputs.residual, t.batch)
        ep.load_residual(dst, c, self.place(t, i, wg), self.spec.epilogue.residual_pairs)

    def product(self, g, u, t, i, wg):
        """Subtile i of the result before its activation, in new fp32 tiles: one, or gate and up."""
        return [self.linear(g, u, t, i, part, wg) for part in range(self.tiles.parts)]

    def linear(self, g, u, t, i, part, wg):
        e, x, bias, c = self.spec.epilogue, tk.rt_fl(self.tiles.store_n), None, None
        if e.bias:
            bias = tk.cv(self.tiles.store_n)
            ep.gather(bias, u.bias[part], i * self.tiles.store_n)
        if e.residual:
            c = u.pending[i] if self.config.hold_in_registers else tk.rt(self.tiles.store_n, self.tiles.out.dtype)
            if not self.config.hold_in_registers:
                self.load_residual(g, c, t, i, wg)
        acc = tk.columns(u.acc, (part * self.tiles.n_stores + i) * self.tiles.store_n, self.tiles.store_n)
        ep.linear(x, acc, e, g.inputs, bias, c)
        return x

    def finish(self, g, u, t, wg):
        """Round the accumulator into what waits: the result or, with ``defer_activation``, the product."""
        for i in range(self.tiles.n_stores):
            parts = self.product(g, u, t, i, wg)
            if self.config.defer_activation:
                for part, x in enumerate(parts):
                    tk.copy(u.pending[part * self.tiles.n_stores + i], x)
            else:
                ep.activate(parts[0], self.spec.epilogue, parts, self.place(t, i, wg), self.tiles.out.dtype)
                tk.copy(u.pending[i], parts[0])

    def subtile_of_result(self, g, u, t, i, wg):
        """Subtile i as it is stored, in registers."""
        if self.config.hold_in_registers and not self.config.defer_activation:
            return u.pending[i]
        if self.spec.epilogue.plain and self.spec.out == "fp32":
            return tk.columns(u.acc, i * self.tiles.store_n, self.tiles.store_n)
        result = tk.rt(self.tiles.store_n, self.tiles.out.dtype)
        if self.config.defer_activation:
            ep.activate_narrow(result, self.spec.epilogue,
                               [u.pending[part * self.tiles.n_stores + i] for part in range(self.tiles.parts)])
            return result
        parts = self.product(g, u, t, i, wg)
        ep.activate(parts[0], self.spec.epilogue, parts, self.place(t, i, wg), self.tiles.out.dtype)
        tk.copy(result, parts[0])
        return result

    def activate_piece(self, u, i, piece):
        """One of ``overlap_epilogue`` pieces of subtile i's activation, in the product's registers: others would
        spill."""
        width = self.tiles.store_n // self.config.overlap_epilogue

        def columns(x):
            return tk.columns(x, piece * width, width)

        parts = [columns(u.pending[part * self.tiles.n_stores + i]) for part in range(self.tiles.parts)]
        ep.activate_narrow(parts[0], self.spec.epilogue, parts)

    @cute.jit
    def write(self, g, s: Constexpr, u: Constexpr, t, wg):
        """A tile of the result, subtile by subtile."""
        for i in cutlass.range_constexpr(self.tiles.n_stores):
            self.write_subtile(g, s, u, t, i, wg)

    def write_subtile(self, g, s, u, t, i, wg):
        self.put(g, s, self.subtile_of_result(g, u, t, i, wg), t, i, wg)

    def put(self, g, s, result, t, i, wg):
        """Subtile i, from registers to where it belongs."""
        at = self.place(t, i, wg)
        if self.spec.store == "tma":
            place = (t.row * self.config.consumers + wg, t.col * self.tiles.n_stores + i)
            self.send(g, s.out[wg * BUFFERS + i % BUFFERS], result, (t.batch, *place) if self.spec.batch else place, wg)
        elif self.spec.store == "rows":
            self.send_rows(operands.of_batch(g.out, t.batch), s.out[wg * BUFFERS + i % BUFFERS], result, at, wg)
        else:
            tk.store_elements(operands.of_batch(g.out, t.batch), result, at.row, at.col, self.spec.accumulate)

    def send_rows(self, out, buffer, part, at, wg):
        """Rows that TMA does not write: through shared memory too, where neighbours of a row are neighbours."""
        if self.tiles.n_stores % BUFFERS:  # otherwise all have read this buffer when they meet over the other one
            tk.sync(OUTPUT_BARRIER + wg, tk.WARPGROUP)
        tk.store(buffer, part)
        tk.sync(OUTPUT_BARRIER + wg, tk.WARPGROUP)
        put_rows(out, buffer, at.row, at.col)

    @cute.jit
    def send(self, g, buffer: Constexpr, part: Constexpr, at, wg):
        # Of an odd number of subtiles, the last and the next tile's first share a buffer: nothing may be on its way.
        tk.store_wait(0 if self.tiles.n_stores % BUFFERS else BUFFERS - 1)
        tk.sync(OUTPUT_BARRIER + wg, tk.WARPGROUP)
        tk.store(buffer, part)
        tk.publish()
        tk.sync(OUTPUT_BARRIER + wg, tk.WARPGROUP)
        if tk.first_warp_of_group():
            tk.store_async(g.out, buffer, at)
