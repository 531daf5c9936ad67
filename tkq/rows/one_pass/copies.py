"""RowCopies: where a thread's part of a row is, and how it comes and goes. What RowNorm (the norms) and
OnePassRows (under softmax and the losses) stand on."""
import cutlass.cute as cute
from cutlass import Constexpr, Float32, const_expr
from cutlass.cute.nvgpu import CopyG2ROp, CopyR2GOp, LoadCacheMode, cpasync

from ...reduction_base import ReductionBase
from ...utils import domain_offset_i64


class RowCopies(ReductionBase):
    """Expects self.config and, while the kernel is traced, self.tile."""

    # ---- where a thread's elements are ------------------------------------------------------------

    def _column(self, tidx, rank):
        """This thread's first column; its vectors are `vector * threads_per_row` columns apart."""
        t = self.tile
        col = tidx % t.threads_per_row * t.vector
        return rank * t.cols + col if t.cluster > 1 else col

    def _view(self, m, coord):
        """This thread's (vector, blocks) of a row of m, from `coord` on."""
        t = self.tile
        layout = cute.make_layout((t.vector, t.blocks), stride=(1, t.vector * t.threads_per_row))
        return cute.make_tensor(domain_offset_i64(coord, m).iterator, layout)

    def _inside(self, col):
        """For each vector: does it lie within the row? True at compile time where no thread's can lie outside."""
        t = self.tile
        step = t.vector * t.threads_per_row
        furthest = t.cols * (t.cluster - 1) + step
        return tuple(True if furthest + j * step <= self.N else col + j * step < self.N for j in range(t.blocks))

    # ---- copies -------------------------------------------------------------------------------------
    # Without hints that x and the result are used once: with L1 passed over by loads (which is what costs) and L2 left
    # first by stores, rows in registers took 0.3 to 5 % longer (an H100; docs/attempts/norms_and_rows.md,
    # "Cache hints").

    def _past_l1(self):
        """Do copies of 16 bytes to shared memory go past L1? No others can."""
        return True

    def _load_atom(self, m):
        bits = self.tile.vector * m.element_type.width
        if self.config.load == "shared":
            past_l1 = bits == 128 and self._past_l1()
            op = cpasync.CopyG2SOp(cache_mode=LoadCacheMode.GLOBAL if past_l1 else LoadCacheMode.ALWAYS)
            return cute.make_copy_atom(op, m.element_type, num_bits_per_copy=bits)
        return cute.make_copy_atom(CopyG2ROp(), m.element_type, num_bits_per_copy=bits)

    def _store_atom(self, m):
        bits = self.tile.vector * m.element_type.width
        return cute.make_copy_atom(CopyR2GOp(), m.element_type, num_bits_per_copy=bits)

    def _fetch_row(self, m, coord, inside, smem, tidx):
        """Start loading this thread's part of a row of m, from `coord` on; where it will be. Vectors outside the row
        are zero."""
        t, source = self.tile, self._view(m, coord)
        if self.config.load == "shared":
            layout = cute.make_layout((t.vector, t.blocks, t.threads), stride=(1, t.vector * t.threads, t.vector))
            held = smem.allocate_tensor(m.element_type, layout, byte_alignment=16)[None, None, tidx]
        else:
            held = cute.make_rmem_tensor((t.vector, t.blocks), m.element_type)
        for j in range(t.blocks):
            self._fetch(self._load_atom(m), source[None, j], held[None, j], inside[j])
        return held

    def _forget(self):
        """Between two passes over shared memory: or the compiler keeps what the first one read, as fp32."""
        if self.config.load == "shared":
            cute.arch.sync_warp()

    def _packed(self, y, m):
        """A vector of floats as m's elements."""
        packed = cute.make_rmem_tensor(self.tile.vector, m.element_type)
        packed.store(y.to(m.element_type))
        return packed

    @cute.jit
    def _fetch(self, atom: Constexpr, src: cute.Tensor, dst: cute.Tensor, inside):
        """dst = src if inside, else 0."""
        if const_expr(inside is True):
            self._copy(atom, src, dst)
        else:
            if inside:
                self._copy(atom, src, dst)
            else:
                dst.fill(0)

    def _copy(self, atom, src, dst):
        """As many copies as the vector has parts of the atom's size."""
        part = cute.make_layout(cute.size(atom.layout_src_tv))
        cute.copy(atom, cute.logical_divide(src, part), cute.logical_divide(dst, part))

    @cute.jit
    def _put(self, atom: Constexpr, src: cute.Tensor, dst: cute.Tensor, stored):
        """dst = src if stored."""
        if const_expr(stored is True):
            self._copy(atom, src, dst)
        else:
            if stored:
                self._copy(atom, src, dst)


def in_registers(part):
    """A vector in registers, or brought there from shared memory."""
    if part.memspace == cute.AddressSpace.rmem:
        return part
    found = cute.make_rmem_tensor_like(part)
    cute.autovec_copy(part, found)
    return found


def floats(part):
    """A vector in registers or shared memory, as fp32. With ``utils.widened``, which takes fewer instructions, norms
    were no faster (layernorm 32768 x 8192 with a bias: 2664 GB/s, where another run without it had 3021)."""
    return in_registers(part).load().to(Float32)


def both(a, b):
    """a and b, where either may be True at compile time."""
    if a is True or b is True:
        return b if a is True else a
    return a & b
