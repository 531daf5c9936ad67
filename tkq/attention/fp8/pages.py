"""K and V of a paged cache, as the attention kernel takes those of packed sequences: K one row behind the other, V
transposed."""
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from tkq.attention.common.sequences import with_batch
from tkq.attention.fp8.spec import KEYS_TOGETHER as KEYS
from tkq.attention.fp8.spec import GatherPagesSpec
from tkq.attention.fp8.transpose import COLS, GROUP, LANES, store_columns, words_at
from tkq.runtime.compile import fake

NANS = 0x7F7F7F7F  # four of e4m3


class Gathered(NamedTuple):
    """keys (B * room, Hk, D); values (Hk, D, whole tiles); cu_k (B + 1,), used_k (B,) int32."""

    keys: Any
    values: Any
    cu_k: Any
    used_k: Any


class GatherPages:
    """Key i of sequence s, one of the first seqused_k[s], is row i % page of page block_table[s, i // page]. It goes
    to row s * room + i of keys and, with zeros behind the last one, into values as ``TransposePacked`` has them of such
    sequences; cu_k says where they begin, used_k how many keys there are of each, whatever seqused_k says. room: of
    each sequence, whole tiles of 128 keys.

    Of a page that is not there keys are NaN and values 0: a row that sees one comes out as NaN, and one that a window
    keeps from it does not.

    A warp has 32 columns of 128 keys, of K and of V, as in ``TransposeValues``; it leaves out what no task visits."""

    THREADS = 256

    def __init__(self, spec: GatherPagesSpec):
        self.spec = spec

    def fake_arguments(self) -> tuple:
        """Any sizes; strides of whole vectors."""
        pages, page, H, B, n, rows = (fake.sym() for _ in range(6))
        ints = lambda n: fake.tensor("int32", (n,), align=4)
        padded, D = fake.sym(divisibility=KEYS), fake.sym(divisibility=COLS)

        def of(shape):
            return fake.tensor("e4m3", shape, (*(fake.sym64(divisibility=16) for _ in shape[1:]), 1), align=16)

        return (of((pages, page, H, D)), of((pages, page, H, D)),
                fake.tensor("int32", (B, n), (fake.sym64(), 1), align=4), ints(B),
                Gathered(of((rows, H, D)), of((H, D, padded)), ints(fake.sym()), ints(B)))

    @cute.jit
    def __call__(self, k: cute.Tensor, v: cute.Tensor, block_table: cute.Tensor, seqused_k: cute.Tensor,
                 to: Gathered, stream: cuda.CUstream):
        to = Gathered(with_batch(to.keys, True), with_batch(to.values, True), to.cu_k, to.used_k)
        threads = self.units(to.values) * LANES
        self.kernel(k, v, block_table, seqused_k, to).launch(
            grid=[cute.ceil_div(threads, self.THREADS), 1, 1], block=[self.THREADS, 1, 1], stream=stream)

    def units(self, values):
        """Warps: each has 32 columns of a tile."""
        _, H, D, padded = values.shape
        return H * (D // COLS) * (padded // KEYS)

    @cute.kernel
    def kernel(self, k: cute.Tensor, v: cute.Tensor, block_table: cute.Tensor, seqused_k: cute.Tensor,
               to: Gathered):
        thread = cute.arch.block_idx()[0] * self.THREADS + cute.arch.thread_idx()[0]
        unit, lane = thread // LANES, thread % LANES
        chunks, H = to.values.shape[2] // COLS, to.values.shape[1]
        of, tile = (unit // chunks % H, unit % chunks), unit // chunks // H
        sequences = block_table.shape[0]
        room = to.keys.shape[1] // sequences
        tiles = room // KEYS + 1  # of a sequence in values: one more than it has room for
        s, i = tile // tiles, tile % tiles
        if s <= sequences:  # behind the last one there is one more without keys
            used = cutlass.max(cutlass.min(seqused_k[cutlass.min(s, sequences - 1)],
                                           block_table.shape[1] * k.shape[1]), 0)
            used = cutlass.select_(s < sequences, used, Int32(0))
            if (unit % (chunks * H) == 0) & (lane == 0) & (i == 0):
                to.cu_k[s] = s * room
                if s < sequences:
                    to.used_k[s] = used
            if (i == 0) | (i * KEYS < used):
                self.gather(lane, (k, v, to.keys, to.values), block_table, of, (s, s * room), (tile, i * KEYS, used))

    @cute.jit
    def gather(self, lane, tensors, block_table: cute.Tensor, of, sequence, where):
        """of: (head, which 32 columns). sequence: (its number, its first row). where: (tile of values, first key,
        end)."""
        k, v, keys, values = tensors
        (h, chunk), (s, row), (tile, begin, end) = of, sequence, where
        first, pages, page = begin + lane // 4 * GROUP, k.shape[0], k.shape[1]
        rows = []
        for j in cutlass.range_constexpr(4):
            # operand_column of the lane's j-th place
            key = first + 8 * (j // 2) + lane % 4 * 2 + j % 2
            value = cute.make_rmem_tensor((COLS // 4,), Uint32)
            value.fill(Uint32(0))
            if key < end:
                found = cute.make_rmem_tensor((COLS // 4,), Uint32)
                found.fill(Uint32(NANS))
                number = block_table[s, key // page]
                if (number >= 0) & (number < pages):
                    at = (number, key % page, h, chunk * COLS)
                    cute.autovec_copy(words_at(k, at, COLS // 4), found)
                    cute.autovec_copy(words_at(v, at, COLS // 4), value)
                cute.autovec_copy(found, words_at(keys, (0, row + key, h, chunk * COLS), COLS // 4))
            rows.append(value)
        store_columns(lane, values, (0, h, chunk), tile, rows)
