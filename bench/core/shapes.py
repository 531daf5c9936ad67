"""Shapes that several scripts time."""

# (M, N) of the norms: from rows that a warp holds to rows that sixteen blocks share
NORM_SHAPES = (
    (32768, 1024),
    (32768, 4096),
    (32768, 8192),
    (16384, 16384),
    (16384, 32768),
    (16384, 65536),
    (8192, 131072),
    (4096, 262144),
)
FORWARD_SHAPES = (NORM_SHAPES[0], (32768, 2048), *NORM_SHAPES[1:])  # of the reductions' forwards
