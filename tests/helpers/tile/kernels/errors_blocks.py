"""What the tile layer refuses of shared memory, semaphores and barriers, and of a block's roles: see errors.py."""
from cutlass import BFloat16, Float16, Float32
from cutlass import Float8E4M3FN as E4M3

import tkq.tile as tk


def ring(rows, cols, dtype=BFloat16):
    return tk.SharedAllocator().tile(tk.st(rows, cols, dtype))


def one(rows, cols, dtype=BFloat16):
    return ring(rows, cols, dtype)[0]


def _bare(**given):
    """A kernel on the LCF template, of which nothing but the numbers is said."""
    kernel = tk.LCF()
    for name, value in dict(inputs=dict(a=tk.st(64, 64)), **given).items():
        setattr(kernel, name, value)
    return kernel


def pipe(stages=2, bytes=16, consumers=1, **more):
    return tk.SharedAllocator().pipe(stages, bytes, consumers, **more)


def sem():
    made = tk.SharedAllocator().semaphores()
    tk.init(made, 1)
    return made


BLOCKS = {
    "scratch_room": (
        lambda x: ring(64, 64).scratch(tk.st(64, 128)),
        ValueError, "scratch: 1 tiles of 64 x 64 bf16 have no room for 64 x 128 bf16"),
    "panel_of_a_ring": (
        lambda x: ring(64, 128).panel(0),
        TypeError, "panel: of a ring, or of 64 x 128 bf16, allowed is one tile whose panels lie one by one"),
    "panel_of_row_groups": (
        lambda x: tk.SharedAllocator().tile(tk.st(64, 128, row_groups=True))[0].panel(0),
        TypeError, "panel: of a ring, or of 64 x 128 bf16 in groups of 8 rows, allowed is one tile"),
    "panel_beyond": (
        lambda x: one(64, 128).panel(2),
        ValueError, "panel: n is 2, 64 x 128 bf16 allows 0 to 1"),
    "arrived_type": (
        lambda x: tk.arrived(tk.rt(64), tk.rt_fl(64)),
        TypeError, "arrived: got 64 x 64 fp32 in registers, allowed are 16-bit register tiles and row vectors"),
    "shared_cols_size": (
        lambda x: tk.load_shared_cols(tk.cv(64), tk.SharedAllocator().vector(32)[None, 0]),
        ValueError, "load_shared_cols: v is column vector of 64"),
    "load_T_shape": (
        lambda x: tk.load_T(tk.rt_bf(64), one(64, 128)),
        ValueError, "load_T: "),
    "load_T_dtype": (
        lambda x: tk.load_T(tk.rt_fl(64), one(64, 64)),
        TypeError, "load_T: dst is 64 x 64 fp32 in registers, src is .*: allowed are the same 16-bit types"),
    "mma_steps": (
        lambda x: tk.mm_ABt(tk.rt(64), one(64, 64), one(64, 64), k=(0, 24)),
        ValueError, r"mm_ABt: k is \(0, 24\), allowed are multiples of 16 from 0 to 64"),
    "mm_d_dtype": (
        lambda x: tk.mm_ABt(tk.rt_bf(64), one(64, 64), one(64, 64)),
        TypeError, "mm_ABt: operand d is 64 x 64 bf16"),
    "mm_a_ring": (
        lambda x: tk.mm_ABt(tk.rt_fl(64), ring(64, 64), one(64, 64)),
        TypeError, "mm_ABt: operand a must be .*one shared tile"),
    "mm_b_ring": (
        lambda x: tk.mma_AB(tk.rt_fl(64), one(64, 64), ring(64, 64)),
        TypeError, "mma_AB: operand b must be one shared tile"),
    "mm_a_dtype": (
        lambda x: tk.mm_ABt(tk.rt_fl(64), one(64, 64, Float32), one(64, 64)),
        TypeError, "mm_ABt: operand a is 64 x 64 fp32"),
    "mm_b_dtype": (
        lambda x: tk.mm_ABt(tk.rt_fl(64), one(64, 64), one(64, 64, Float32)),
        TypeError, "mm_ABt: operand b is 64 x 64 fp32"),
    "mm_mixed": (
        lambda x: tk.mm_ABt(tk.rt_fl(64), one(64, 64), one(64, 64, Float16)),
        TypeError, "operand a is bf16 and operand b fp16"),
    "mm_fp8_AB": (
        lambda x: tk.mm_AB(tk.rt_fl(64), one(64, 64, E4M3), one(64, 64, E4M3)),
        TypeError, "mm_AB: operands of 8 bits must have K contiguous"),
    "mm_AtB_registers": (
        lambda x: tk.mm_AtB(tk.rt_fl(64), tk.rt_bf(64), one(64, 64)),
        TypeError, "mm_AtB: operand a is transposed"),
    "mm_rows": (
        lambda x: tk.mm_ABt(tk.rt_fl(64), one(32, 64), one(64, 64)),
        ValueError, "mm_ABt: operand a is 32 x 64 bf16: its 32 rows"),
    "mm_k": (
        lambda x: tk.mm_ABt(tk.rt_fl(64), one(64, 32), one(64, 64)),
        ValueError, r"operand a is 64 x 32 bf16 \(K = 32\), operand b is 64 x 64 bf16 \(K = 64\)"),
    "mm_k_step": (
        lambda x: tk.mm_AtB(tk.rt_fl(64), one(24, 64), one(24, 64)),
        ValueError, "mm_AtB: K is 24, allowed for bf16 are multiples of 16"),
    "mm_n": (
        lambda x: tk.mm_ABt(tk.rt_fl(48), one(64, 64), one(64, 64)),
        ValueError, "mm_ABt: operand d has 48 columns"),
    "mm_panels": (
        lambda x: tk.mm_AB(tk.rt_fl(48), one(64, 64), one(64, 192)),
        ValueError, "mm_AB: operand d has 48 columns, which straddle operand b's panels of 64"),
    "mm_a_part": (
        lambda x: tk.mm_ABt(tk.rt_fl(64), one(128, 64), one(64, 64), a_part=2),
        ValueError, "mm_ABt: a_part is 2, allowed are 0 to 1"),
    "mm_b_part": (
        lambda x: tk.mm_ABt(tk.rt_fl(64), one(64, 64), one(64, 64), b_part=1),
        ValueError, "mm_ABt: b_part is 1, allowed are 0 to 0"),
    "store_ring": (
        lambda x: tk.store(ring(64, 64), tk.rt_fl(64)),
        TypeError, "store: the shared operand must be one tile"),
    "store_shape": (
        lambda x: tk.store(one(64, 64), tk.rt_fl(32)),
        ValueError, "store: the register tile is 64 x 32 fp32"),
    "store_dtype": (
        lambda x: tk.store(one(64, 64), tk.rt_hf(64)),
        TypeError, "store: src is 64 x 64 fp16 .*dst is 64 x 64 bf16"),
    "store_fp8": (
        lambda x: tk.store(one(64, 64, E4M3), tk.rt_fl(64)),
        TypeError, "store: src is 64 x 64 fp32"),
    "store_T_shape": (
        lambda x: tk.store_T(one(64, 32), tk.rt_fl(32)),
        ValueError, "store_T: the register tile is 64 x 32"),
    "store_T_cols": (
        lambda x: tk.store_T(one(24, 64), tk.rt_fl(24)),
        ValueError, "store_T: src is 64 x 24 fp32"),
    "store_T_fp32": (
        lambda x: tk.store_T(one(64, 64, Float32), tk.rt_fl(64)),
        TypeError, "store_T: .*allowed are fp32 to bf16 and fp16"),
    "load_dtype": (
        lambda x: tk.load(tk.rt_fl(64), one(64, 64)),
        TypeError, "load: dst is 64 x 64 fp32 .*src is 64 x 64 bf16"),
    "load_not_a_tile": (
        lambda x: tk.load(tk.rv(), one(64, 64)),
        TypeError, "load: the register operand must be a register tile, got row vector"),
    "load_elements_ring": (
        lambda x: tk.load_elements(ring(64, 64, Float32), x, 0, 0, 128, 0),
        TypeError, "load_elements: dst must be one shared tile"),
    "load_elements_dtype": (
        lambda x: tk.load_elements(one(64, 64), x, 0, 0, 128, 0),
        TypeError, "load_elements: src is fp32, dst is 64 x 64 bf16"),
    "load_elements_threads": (
        lambda x: tk.load_elements(one(64, 64, Float32), x, 0, 0, 96, 0),
        ValueError, "load_elements: .*96 threads"),
    "copy_async_width": (
        lambda x: tk.copy_async(tk.SharedAllocator().vector(8, dtype=BFloat16), 0, x, (0, 0)),
        TypeError, "copy_async: src is fp32, dst bf16"),
    "bulk_load_bytes": (
        lambda x: tk.bulk_load(0, 0, 24, 0),
        ValueError, "bulk_load: bytes is 24"),
    "bulk_store_bytes": (
        lambda x: tk.bulk_store(0, 0, 0),
        ValueError, "bulk_store: bytes is 0"),
    "bulk_add_bytes": (
        lambda x: tk.bulk_add(0, 0, -16),
        ValueError, "bulk_add: bytes is -16"),
    "pairs_half": (
        lambda x: ring(64, 64).pairs,
        TypeError, "pairs: the tile is 64 x 64 bf16"),
    "stacked_wide": (
        lambda x: ring(64, 128).stacked(2),
        ValueError, "stacked: 64 x 128 bf16 is wider"),
    "stacked_stages": (
        lambda x: ring(64, 64).stacked(2),
        ValueError, "stacked: n is 2, allowed are divisors of the 1 stages"),
    "sync_barrier": (
        lambda x: tk.sync(16, 128),
        ValueError, "sync: barrier is 16"),
    "sync_threads": (
        lambda x: tk.sync_arrive(1, 100),
        ValueError, "sync_arrive: threads is 100"),
    "ring_stages": (
        lambda x: tk.ring(0),
        ValueError, "ring: stages is 0"),
    "pipe_stages": (
        lambda x: tk.SharedAllocator().pipe(2, 16, 0),
        ValueError, "Pipe: consumers is 0"),
    "post_fields": (
        lambda x: tk.SharedAllocator().mailbox(2, 1, 1).post(tk.ring(1), 3),
        ValueError, "post: 1 values, the mailbox has 2"),
    "schedule_kind": (
        lambda x: tk.Schedule(3, "fastest"),
        ValueError, "Schedule: kind is 'fastest'"),
    "schedule_counter": (
        lambda x: tk.Schedule(3, "dynamic"),
        ValueError, "Schedule: counter is None"),
    "schedule_tell": (
        lambda x: tk.Schedule(3, "dynamic", 2, x).following(1, 0),
        ValueError, "following: tell is None"),
    "schedule_fetched": (
        lambda x: tk.Schedule(3, "dynamic", 1, x).following(1),
        ValueError, "following: fetched is None"),
    "registers_many": (
        lambda x: tk.specialise(lambda: None, lambda wg: None, 2, (40, 248)),
        ValueError, "specialise: registers 40 . 2 x 248"),
    "registers_step": (
        lambda x: tk.specialise(lambda: None, lambda wg: None, 2, (24, 100)),
        ValueError, "specialise: registers are 24 and 100"),
    "consumers": (
        lambda x: tk.specialise(lambda: None, lambda wg: None, 4),
        ValueError, "specialise: consumers is 4"),
    "turns": (
        lambda x: tk.PingPong(15, 0),
        ValueError, "PingPong: groups is 15 from barrier 2, allowed are 1 to 15"),
    "lcf_lag": (
        lambda x: _bare(stages=2, lag=2).run(None),
        ValueError, "LCF: lag is 2 with 2 stages, allowed are 0 to 1"),
    "lcf_lag_below": (
        lambda x: _bare(lag=-1).run(None),
        ValueError, "LCF: lag is -1 with 4 stages"),
    "lcf_stages": (
        lambda x: _bare(stages=0, lag=0).run(None),
        ValueError, "LCF: stages is 0"),
    "lcf_consumers": (
        lambda x: _bare(consumers=0).run(None),
        ValueError, "LCF: consumers is 0"),
    "lcf_memory": (
        lambda x: _bare(stages=30).run(None),
        ValueError, "SharedAllocator: with 30 tiles of 64 x 64 bf16 the block has 245760 bytes .*allowed are 231424"),
    "memory_tiles": (
        lambda x: tk.SharedAllocator().tile(tk.st(64, 64), 40),
        ValueError, "SharedAllocator: with 40 tiles of 64 x 64 bf16 the block has 327680 bytes"),
    "memory_vector": (
        lambda x: tk.SharedAllocator().vector(1 << 16),
        ValueError, "SharedAllocator: with a tensor of 65536 fp32 the block has 262144 bytes"),
    "memory_array": (
        lambda x: tk.SharedAllocator().allocate_array(BFloat16, 1 << 17),
        ValueError, "SharedAllocator: with an array of 131072 bf16 the block has 262144 bytes"),
    "zero_shared": (
        lambda x: tk.zero(one(64, 64)),
        TypeError, "zero: dst is SharedTile.*allowed are register tiles and vectors"),
    "neg_infty_shared": (
        lambda x: tk.neg_infty(one(64, 64)),
        TypeError, "neg_infty: dst is SharedTile"),
    "mm_k_pair": (
        lambda x: tk.mm_ABt(tk.rt_fl(64), one(64, 64), one(64, 64), k=64),
        TypeError, "mm_ABt: k is 64, allowed is a pair"),
    "mma_wait_most": (
        lambda x: tk.mma_wait(9),
        ValueError, "mma_wait: n is 9, allowed are 0 to 7"),
    "mma_wait_below": (
        lambda x: tk.mma_wait(-1),
        ValueError, "mma_wait: n is -1"),
    "store_wait_below": (
        lambda x: tk.store_wait(-1),
        ValueError, "store_wait: n is -1, allowed are numbers from 0 on"),
    "copy_async_tile": (
        lambda x: tk.copy_async(one(64, 64, Float32), 0, x, (0, 0)),
        TypeError, "copy_async: dst is SharedTile"),
    "copy_async_arrive": (
        lambda x: tk.copy_async_arrive(None),
        TypeError, "copy_async_arrive: sem is None"),
    "prefetch_tensor": (
        lambda x: tk.prefetch(x),
        TypeError, "prefetch: the global operand is .*allowed is a descriptor"),
    "load_src": (
        lambda x: tk.load_async(one(64, 64), None, (0, 0), sem()),
        TypeError, "load_async: the global operand is None, allowed is a descriptor"),
    "init_arrivals": (
        lambda x: tk.init(sem(), 0),
        ValueError, "init: arrivals is 0, allowed are 1 to 1048575"),
    "wait_sem": (
        lambda x: tk.wait(None, 0),
        TypeError, "wait: sem is None"),
    "arrive_sem": (
        lambda x: tk.arrive(3),
        TypeError, "arrive: sem is 3"),
    "arrive_at_sem": (
        lambda x: tk.arrive_at(None, 0),
        TypeError, "arrive_at: sem is None"),
    "arrive_cluster_blocks": (
        lambda x: tk.arrive_cluster(sem(), 33),
        ValueError, "arrive_cluster: blocks is 33, allowed are 1 to 16"),
    "expect_below": (
        lambda x: tk.expect_bytes(sem(), -16),
        ValueError, "expect_bytes: bytes is -16, allowed are 0 to 1048575"),
    "expect_most": (
        lambda x: tk.expect_bytes(sem(), 1 << 21),
        ValueError, "expect_bytes: bytes is 2097152"),
    "expect_sem": (
        lambda x: tk.expect_bytes(None, 16),
        TypeError, "expect_bytes: sem is None"),
    "remote_floats": (
        lambda x: tk.store_remote(tk.SharedAllocator().vector(4).iterator, [1.0, 2.0], sem(), 0),
        TypeError, r"store_remote: values is \[1.0, 2.0\], allowed is a list of Float32"),
    "remote_three": (
        lambda x: tk.store_remote(tk.SharedAllocator().vector(4).iterator, [Float32(1.0)] * 3, sem(), 0),
        ValueError, "store_remote: 3 values, allowed are 1, 2 and 4"),
    "pipe_bytes": (
        lambda x: pipe(bytes=1 << 21),
        ValueError, "Pipe: bytes is 2097152, allowed are 0 to 1048575"),
    "pipe_copies": (
        lambda x: pipe(copies=-1),
        ValueError, "Pipe: copies is -1"),
    "mailbox_consumers": (
        lambda x: tk.SharedAllocator().mailbox(1, 2, 0),
        ValueError, "Mailbox: consumers is 0"),
    "producer_warps": (
        lambda x: tk.specialise(lambda: None, lambda wg: None, 2, (), 5),
        ValueError, "specialise: producer_warps is 5, allowed are 1 to 4"),
    "schedule_no_cluster": (
        lambda x: tk.Schedule(3, "static", 0),
        ValueError, "Schedule: cluster is 0, allowed is 1 or more"),
}
