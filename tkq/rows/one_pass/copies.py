"""RowCopies: where a thread's part of a row is, and how it comes and goes. A part of OnePassRows (under softmax and the
losses), and of the norms' RowNorm and PerHeadBackward."""
from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Constexpr, Float32, const_expr
from cutlass.cute.nvgpu import CacheEvictionPriority, CopyG2ROp, CopyR2GOp, LoadCacheMode, cpasync

from ...utils import domain_offset_i64
from .columns import Columns, InterleavedColumns


@dataclass(frozen=True)
class RowCopies:
    """columns: which a thread has. load: "registers" or "shared", where rows lie.

    past_l1: do rows that are loaded go past L1? Copies of 16 bytes to shared memory can, and loads of 8 bytes and more
    to registers: smaller ones share a sector with their neighbours.
    aligned: views begin at multiples of 16 bytes, by the choice of their `coord`, whatever is known of the tensor.
    """

    columns: Columns | InterleavedColumns
    load: str
    past_l1: bool = False
    aligned: bool = False

    @property
    def tile(self):
        return self.columns.tile

    # ---- where a thread's elements are ------------------------------------------------------------

    def view(self, m, coord):
        """This thread's (vector, blocks) of a row of m, from `coord` on."""
        start = domain_offset_i64(coord, m).iterator
        if self.aligned:
            start = cute.make_ptr(m.element_type, start.toint(), m.memspace, assumed_align=16)
        layout = cute.make_layout((self.tile.vector, self.tile.blocks), stride=(1, self.columns.pace))
        return cute.make_tensor(start, layout)

    # ---- copies -------------------------------------------------------------------------------------
    # Without hints that x and the result are used once: with L1 passed over by loads (which is what costs) and L2 left
    # first by stores, rows in registers took 0.3 to 5 % longer (an H100; docs/attempts/norms_and_rows.md,
    # "Cache hints").

    def load_atom(self, m):
        bits = self.tile.vector * m.element_type.width
        if self.load == "shared":
            mode = LoadCacheMode.GLOBAL if bits == 128 and self.past_l1 else LoadCacheMode.ALWAYS
            return cute.make_copy_atom(cpasync.CopyG2SOp(cache_mode=mode), m.element_type, num_bits_per_copy=bits)
        hint = dict(l1c_evict_priority=CacheEvictionPriority.NO_ALLOCATE) if self.past_l1 and bits >= 64 else {}
        return cute.make_copy_atom(CopyG2ROp(), m.element_type, num_bits_per_copy=bits, **hint)

    def store_atom(self, m):
        bits = self.tile.vector * m.element_type.width
        return cute.make_copy_atom(CopyR2GOp(), m.element_type, num_bits_per_copy=bits)

    def fetch_row(self, m, coord, inside, smem, thread):
        """Start loading this thread's part of a row of m, from `coord` on; where it will be. Vectors outside the row
        are zero."""
        t, source = self.tile, self.view(m, coord)
        if self.load == "shared":
            layout = cute.make_layout((t.vector, t.blocks, t.threads), stride=(1, t.vector * t.threads, t.vector))
            held = smem.allocate_tensor(m.element_type, layout, byte_alignment=16)[None, None, thread]
        else:
            held = cute.make_rmem_tensor((t.vector, t.blocks), m.element_type)
        for j in range(t.blocks):
            self.fetch(self.load_atom(m), source[None, j], held[None, j], inside[j])
        return held

    def forget(self):
        """Between two passes over shared memory: or the compiler keeps what the first one read, as fp32."""
        if self.load == "shared":
            cute.arch.sync_warp()

    def packed(self, y, m):
        """A vector of floats as m's elements."""
        packed = cute.make_rmem_tensor(self.tile.vector, m.element_type)
        packed.store(y.to(m.element_type))
        return packed

    @cute.jit
    def fetch(self, atom: Constexpr, src: cute.Tensor, dst: cute.Tensor, inside):
        """dst = src if inside, else 0."""
        if const_expr(inside is True):
            self.copy(atom, src, dst)
        else:
            if inside:
                self.copy(atom, src, dst)
            else:
                dst.fill(0)

    def copy(self, atom, src, dst):
        """As many copies as the vector has parts of the atom's size."""
        part = cute.make_layout(cute.size(atom.layout_src_tv))
        cute.copy(atom, cute.logical_divide(src, part), cute.logical_divide(dst, part))

    @cute.jit
    def put(self, atom: Constexpr, src: cute.Tensor, dst: cute.Tensor, stored):
        """dst = src if stored."""
        if const_expr(stored is True):
            self.copy(atom, src, dst)
        else:
            if stored:
                self.copy(atom, src, dst)


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
