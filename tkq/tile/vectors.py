"""Loads and stores of a few neighbouring elements, and how a thread finds them."""
import cutlass.cute as cute
from cutlass import Float32, Int64
from cutlass.cute.nvgpu import CacheEvictionPriority, CopyG2ROp, CopyR2GOp, StoreCacheMode
from cutlass.cutlass_dsl import dsl_user_op


@dsl_user_op
def domain_offset_i64(coord, tensor: cute.Tensor, *, loc=None, ip=None) -> cute.Tensor:
    """The tensor seen from element `coord` on, its address computed in 64 bits: for 2**31 elements and more.

    coord: one integer for each (flat) mode. The result keeps the layout, and the alignment that is known of the tensor:
    an offset that breaks it is the caller's mistake.
    """
    offsets = [Int64(c) * Int64(s) for c, s in zip(coord, cute.flatten_to_tuple(tensor.stride), strict=True)]
    address = tensor.iterator.toint(loc=loc, ip=ip) + sum(offsets[1:], offsets[0]) * (tensor.element_type.width // 8)
    pointer = cute.make_ptr(tensor.element_type, address, tensor.memspace,
                            assumed_align=tensor.iterator.alignment, loc=loc, ip=ip)
    return cute.make_tensor(pointer, tensor.layout)


def run_at(m, coord, n: int):
    """The n neighbours of m from `coord` on, in the last mode; the address is computed in 64 bits."""
    return cute.make_tensor(domain_offset_i64(coord, m).iterator, cute.make_layout(n))


def load(src, once: bool = False):
    """src, in registers, in accesses of at most 16 bytes.

    once: accesses of 8 bytes and more pass L1 over. It has to be measured: most kernels lose 1 to 4 % by it and by
    `store`'s (docs/attempts/norms_and_rows.md, "Cache hints")."""
    dtype = src.element_type
    bits = min(128, cute.size(src) * dtype.width)
    hint = dict(l1c_evict_priority=CacheEvictionPriority.NO_ALLOCATE) if once and bits >= 64 else {}
    atom = cute.make_copy_atom(CopyG2ROp(), dtype, num_bits_per_copy=bits, **hint)
    held = cute.make_rmem_tensor(cute.size(src), dtype)
    part = cute.make_layout(bits // dtype.width)
    cute.copy(atom, cute.logical_divide(src, part), cute.logical_divide(held, part))
    return held


def wide(held):
    """The elements of a register tensor as fp32 values, one by one."""
    values = held.load().to(Float32)
    return [values[i] for i in range(cute.size(held))]


def packed(values, dtype):
    """fp32 values as a register tensor of `dtype`."""
    n = len(values)
    gathered, result = cute.make_rmem_tensor(n, Float32), cute.make_rmem_tensor(n, dtype)
    for i, value in enumerate(values):
        gathered[i] = value
    result.store(gathered.load().to(dtype))
    return result


def store(held, dst, once: bool = False):
    """dst = held, in accesses of at most 16 bytes. once: L2 may drop it first, as in `load`."""
    dtype = held.element_type
    bits = min(128, cute.size(held) * dtype.width)
    hint = dict(store_cache_mode=StoreCacheMode.STREAMING) if once and bits >= 64 else {}
    atom = cute.make_copy_atom(CopyR2GOp(), dtype, num_bits_per_copy=bits, **hint)
    part = cute.make_layout(bits // dtype.width)
    cute.copy(atom, cute.logical_divide(held, part), cute.logical_divide(dst, part))
