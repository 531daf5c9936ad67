"""What was measured of plans for rows: plain numbers, which `plan` makes plans of."""

# By loads and column sums, as norms' backward have them: (most columns, blocks of a cluster, elements of a thread,
# warps, flags). Of torch.add's bytes a second on an H100 with L2 cleared, 2^28 elements, in brackets what the ladder or
# the table before gave: one column sum at 512, 1024, 2048 columns 0.961 (0.939), 0.965 (0.946), 0.991 (0.941); two at
# 1024 and 2048 0.961 (0.942), 0.969 (0.937); three loads at 2048 and 4096 0.992 (0.963), 0.992 (0.961), of addcmul's
# (docs/attempts/norms_and_rows.md). Beyond, L2 not cleared (bench/tune/persistent_rows.py), at 4096, 8192, .. 131072:
# one 0.983
# (0.929), 0.980 (0.944), 0.964 (0.943), 0.968 (0.918), 0.998 (0.934), 0.968 (0.939); two 0.967 (0.918), 0.967 (0.935),
# 0.960, 0.984, 0.975 (0.948), 0.970. What is gained has little to do with the threads: how much of each row a block
# copies at a time, how many blocks share one, and whether another block works meanwhile, decides. We do not know why
# 16 blocks beat 8 at 65536 columns.
TABLE = {
    ((16, 16), 1): (
        (2048, 1, 16, 4, dict(stages=4, min_blocks_per_sm=2)), (4096, 1, 16, 8, dict(stages=4)), (8192, 2, 16, 8, {}),
        (16384, 1, 32, 16, {}), (32768, 2, 32, 16, {}), (65536, 16, 16, 8, {}), (131072, 16, 32, 8, {})),
    ((16, 16), 2): (
        (512, 1, 16, 4, dict(stages=4, min_blocks_per_sm=3)),
        (1024, 1, 32, 4, dict(stages=3, min_blocks_per_sm=2, streaming=True)),
        (2048, 1, 16, 4, dict(stages=4, min_blocks_per_sm=3)), (4096, 1, 32, 4, dict(stages=3, min_blocks_per_sm=2)),
        (8192, 2, 16, 8, dict(stages=3, min_blocks_per_sm=2)), (16384, 2, 32, 8, {}),
        (32768, 8, 16, 8, dict(stages=4, min_blocks_per_sm=2)), (65536, 16, 16, 8, {}), (131072, 16, 32, 8, {})),
    ((16, 16, 16), 1): (
        (1024, 1, 32, 8, {}), (2048, 1, 16, 4, dict(stages=4, min_blocks_per_sm=2)), (4096, 1, 16, 8, dict(stages=4))),
}

# Of kernels that write numbers alone, whose rows threads hold in registers: blocks of a cluster, warps of a block,
# bytes of a row, and of vectors beside it, to a thread. The first that holds a row is taken.
HELD = ((1, 4, 64), (1, 8, 64), (2, 8, 64), (4, 8, 64), (8, 8, 64))

# Of the same, with longer rows: blocks of a cluster, warps, blocks on an SM; 32 elements of a row to a
# thread. They wait for exchanges and not for stores, and need others that work meanwhile more than a deep ring.
REDUCING = ((1, 4, 3), (1, 8, 3), (1, 16, 2), (2, 8, 3), (4, 8, 3), (8, 8, 3), (16, 8, 3))
