"""The tile layer's test kernels: which are compiled (tests/cpu) and run (tests/gpu), and what their SASS must show.

Nothing here imports the DSL.
"""
from dataclasses import dataclass

from tkq.runtime import Recipe


@dataclass(frozen=True)
class Product:
    """form: AB, ABt, AtB, AtBt. d is (64 * a_parts, n): taller a and wider b are taken in parts.

    twice: ``mm_`` then ``mma_`` with the same operands. loop: the parts come from run-time loops. span: of K, the part
    that is multiplied; all of it where it is empty."""

    form: str
    a_dtype: str
    b_dtype: str
    n: int
    k: int
    registers: bool = False
    a_parts: int = 1
    b_parts: int = 1
    twice: bool = False
    loop: bool = False
    swizzle: int = 0  # of both operands; 0: the widest
    span: tuple = ()

    @property
    def a_shape(self):
        m = 64 * self.a_parts
        return (self.k, m) if self.form.startswith("At") else (m, self.k)

    @property
    def b_shape(self):
        return (self.n, self.k) if self.form.endswith("Bt") else (self.k, self.n)

    def sass(self):
        return ("QGMMA" if self.a_dtype[0] == "e" else "HGMMA", "UTMALDG") + ("LDSM",) * self.registers


def _products():
    half = [("bf16", "bf16"), ("fp16", "fp16")]
    for form in ("ABt", "AB", "AtB", "AtBt"):
        for i, pair in enumerate(half):
            yield Product(form, *pair, n=(64, 128)[i], k=(64, 80)[i])
        for swizzle in (32, 64, 128):
            yield Product(form, "bf16", "bf16", 64, 64, swizzle=swizzle)
        yield Product(form, "bf16", "bf16", 256, 16, twice=True)
        yield Product(form, "bf16", "bf16", 128, 64, a_parts=2, b_parts=2, loop=True)
        yield Product(form, "fp16", "fp16", 64, 64, a_parts=1, b_parts=2)
    for form in ("ABt", "AB"):
        for i, pair in enumerate(half):
            yield Product(form, *pair, n=(64, 176)[i], k=(128, 16)[i], registers=True)
    yield Product("ABt", "bf16", "bf16", 8, 16)
    yield Product("ABt", "bf16", "bf16", 176, 128)
    yield Product("AB", "bf16", "bf16", 64, 64, registers=True, b_parts=4, twice=True, loop=True)  # parts of a panel
    for a in ("e4m3", "e5m2"):
        for b in ("e4m3", "e5m2"):
            yield Product("ABt", a, b, 64, 128)
            yield Product("ABt", a, b, 24, 32, registers=True)
    for swizzle in (32, 64):
        yield Product("ABt", "e4m3", "e4m3", 64, 128, swizzle=swizzle)
        yield Product("ABt", "e4m3", "e4m3", 64, 128, registers=True, swizzle=swizzle)
    yield Product("ABt", "e4m3", "e4m3", 256, 128, a_parts=2, b_parts=2, twice=True, loop=True)
    yield Product("ABt", "bf16", "bf16", 64, 128, twice=True, span=(48, 112))
    yield Product("AB", "fp16", "fp16", 64, 64, registers=True, span=(16, 64))
    yield Product("AtB", "bf16", "bf16", 64, 64, span=(32, 48))
    yield Product("ABt", "e4m3", "e4m3", 64, 128, span=(32, 96))


PRODUCTS = list(_products())

# cols, register type, shared type, swizzle, transposed
ROUND_TRIPS = [(cols, "fp32", half, None, False) for half in ("bf16", "fp16") for cols in (16, 64, 80, 256)]
ROUND_TRIPS += [(cols, "fp32", "fp32", None, False) for cols in (8, 24, 64, 128)]
ROUND_TRIPS += [(48, "bf16", "bf16", None, False), (128, "fp16", "fp16", None, False)]
ROUND_TRIPS += [(64, "fp32", dtype, swizzle, False) for dtype in ("bf16", "fp32") for swizzle in (32, 64)]
ROUND_TRIPS += [(64, "fp32", "bf16", None, True), (128, "fp32", "fp16", 32, True), (16, "fp32", "bf16", 64, True),
                (80, "bf16", "bf16", None, True)]

# dtype, rank, rows, cols, swizzle, add
TMA_COPIES = [("bf16", 2, 64, 64, None, False), ("fp16", 3, 24, 80, None, False), ("fp32", 4, 64, 32, None, False),
              ("e4m3", 2, 64, 128, None, False), ("e5m2", 3, 8, 32, None, False), ("int32", 2, 256, 8, None, False),
              ("e4m3", 4, 128, 96, None, False), ("fp32", 3, 64, 64, 64, False), ("bf16", 2, 40, 128, 32, False)]
TMA_COPIES += [("fp32", 2, 64, 64, None, True), ("bf16", 3, 64, 64, 32, True), ("fp16", 4, 8, 16, None, True)]

# cols, dtype
NARROW_STORES = [(32, "bf16"), (128, "fp16"), (256, "bf16")]

# rows, cols, pack
PIECES = [(64, 64, 1), (64, 128, 4), (16, 96, 8)]
PAGES = [(80, 192, 16), (64, 128, 8)]  # rows and columns of a tile, rows of a copy

# dtype, rows, cols, cluster, stages
MULTICASTS = [("bf16", 64, 64, 1, 2), ("bf16", 64, 64, 2, 2), ("bf16", 176, 128, 2, 3), ("e4m3", 128, 128, 2, 1),
              ("bf16", 64, 128, 4, 2), ("fp32", 32, 32, 4, 3), ("bf16", 64, 64, 8, 2), ("bf16", 128, 64, 16, 2)]

# dtype, rows, cols, threads
ELEMENTS = [("bf16", 64, 64, 128), ("fp32", 24, 8, 64), ("e4m3", 64, 32, 128), ("fp16", 128, 64, 256)]

# stages, consumers, registers
PIPES = [(1, 1, ()), (2, 1, (40, 200)), (2, 2, ()), (3, 2, ()), (1, 3, ()), (3, 3, ())]

# kind, cluster, capped
DEALS = [("single", 1, True), ("single", 2, True), ("static", 1, True), ("static", 1, False), ("static", 2, True),
         ("static", 2, False), ("dynamic", 1, True), ("dynamic", 1, False),
         ("dynamic", 2, True), ("dynamic", 4, False)]

# kind, consumers, stages, lag
LCFS = [("single", 2, 3, 1), ("static", 2, 3, 1), ("dynamic", 2, 3, 1), ("static", 1, 2, 0), ("dynamic", 3, 4, 2),
        ("dynamic", 1, 1, 0)]

# cluster, floats
REMOTE = [(2, 1), (4, 2), (8, 4)]
SENT = [4, 100]

# Every tenth is compiled by tests/cpu.
ELEMENTWISE = [(64, "fp32"), (8, "fp32"), (176, "bf16"), (16, "fp16"), (128, "fp32"), (32, "bf16")]
# dtype, cols
NARROW = [("bf16", 64), ("fp16", 32), ("bf16", 176)]

# cols, which of them by a polynomial
EXPONENTIALS = [(64, 0), (64, 1), (32, 3), (128, 4)]

# n, evict_first
BULK = [(1024,), (256, True)]

PRODUCERS = [2, 3, 4]

# dtype, cols of store_elements that add
ACCUMULATED = [("fp32", 24), ("bf16", 32)]

# of the source, of the tile, cols of load_from
LOADED_FROM = [("fp32", "fp32", 24), ("bf16", "fp32", 32), ("fp32", "bf16", 64)]

# (registers, warpgroups, warps) of each role
ROLES = [((24, 1, 1), (72, 1, 4), (144, 2, 4)), ((40, 1, 2), (232, 2, 4))]

FILLS = [(24, "fp32"), (64, "fp32"), (256, "bf16"), (16, "fp16"), (176, "fp32"), (32, "bf16")]


def _round_trip_sass(cols, src, dst, swizzle, transposed):
    return ("UTMASTG",) + (() if dst == "fp32" else ("STSM", "LDSM"))


def _cases():
    """(builder, args, opcodes that its SASS must hold)"""
    yield from (("mma:build", (p,), p.sass()) for p in PRODUCTS)
    yield from (("transfer:build_round_trip", x, _round_trip_sass(*x)) for x in ROUND_TRIPS)
    yield "transfer:build_stacked", (32,), ("UTMALDG", "UTMASTG")
    yield "transfer:build_panels", (192,), ("UTMALDG", "UTMASTG")
    yield from (("memory:build_tma", x, ("UTMALDG", "UTMAREDG" if x[-1] else "UTMASTG")) for x in TMA_COPIES)
    yield from (("memory:build_pieces", x, ("UTMALDG", "UTMASTG")) for x in PIECES)
    yield from (("pages:build", x, ("HGMMA", "UTMALDG.5D")) for x in PAGES)
    yield from (("memory:build_multicast", x, ("UTMALDG", "UTMASTG", "USETMAXREG")) for x in MULTICASTS)
    yield from (("memory:build_bulk", x, ("UBLKCP", "UBLKRED", "REDG", "ATOMG")) for x in BULK)
    yield from (("memory:build_copy_async", (stages,), ("LDGSTS",)) for stages in (1, 3))
    yield from (("memory:build_elements", x, ("UTMASTG",)) for x in ELEMENTS)
    yield from (("sync:build_pipe", x, ("UTMALDG", "USETMAXREG")) for x in PIPES)
    yield from (("sync:build_commit", x, ("SYNCS",)) for x in ((1, 1), (1, 2), (3, 3)))
    yield from (("sync:build_mailbox", x, ("SYNCS",)) for x in ((1, 4), (2, 7)))
    yield from (("sync:build_producers", (x,), ("SYNCS", "USETMAXREG")) for x in PRODUCERS)
    yield from (("sync:build_turns", x, ("BAR",)) for x in ((1,), (2,), (3,)))
    yield "sync:build_no_turns", (), ()
    yield from (("sync:build_ring", x, ()) for x in ((1, 0), (2, 0), (3, 5)))
    yield from (("sync:build_cluster", x, ("UCGABAR_WAIT",)) for x in ((2, False), (4, True)))
    yield from (("narrow:build_narrow", x, ("F2FP", "LDS.64")) for x in NARROW)
    yield from (("narrow:build_triangle", (dtype,), ("F2FP",)) for dtype in ("bf16", "fp16"))
    yield from (("narrow:build_e4m3", (cols,), ("F2FP.SATFINITE.E4M3",)) for cols in (32, 128))
    yield from (("narrow:build_exp2", x, ("MUFU.EX2",) if x[1] != 1 else ()) for x in EXPONENTIALS)
    yield from (("narrow:build_exp2_e4m3", (64, 0.37, every), ("HFMA2", "VIADDMNMX.S16x2")) for every in (1, 3))
    yield from (("narrow:build_roles", (x,), ("USETMAXREG",)) for x in ROLES)
    for name in ("build_pairs", "build_split_pairs"):
        yield from ((f"pairs:{name}", (x,), ("HGMMA", "LDS.128", "F2FP")) for x in ("bf16", "fp16"))
    yield "narrow:build_scratch", (), ("UTMALDG", "UTMASTG", "STSM")
    yield from ((f"sync:{x}", (), ()) for x in ("build_semaphores", "build_named_barrier", "build_who"))
    yield from (("schedule:build_deal", x, ("ATOMG", "STAS")[:x[1]] if x[0] == "dynamic" else ()) for x in DEALS)
    yield from (("schedule:build_lcf", x, ("HGMMA", "UTMALDG", "UTMASTG", "STSM", "USETMAXREG")) for x in LCFS)
    yield "schedule:build_own_schedule", ("static", 2, 3, 1), ("HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG")
    yield "grid:build_grid", (), ("REDG",)
    yield "grid:build_ticket", (), ("ATOMG",)
    yield from (("grid:build_store_remote", x, ("STAS",)) for x in REMOTE)
    yield from (("grid:build_bulk_send", (x,), ("UBLKCP",)) for x in SENT)
    yield from (("maps:build_elementwise", x, ()) for x in ELEMENTWISE)
    yield from (("maps:build_rows", (cols,), ()) for cols in (16, 48))
    yield from (("maps:build_reductions", (cols,), ("SHFL",)) for cols in (8, 24, 64, 176))
    yield from (("maps:build_fills", x, ()) for x in FILLS)
    yield from (("maps:build_copies", x, ()) for x in ((64, "fp16"), (16, "bf16"), (176, "bf16")))
    yield "maps:build_columns", (64,), ()
    yield "maps:build_half_columns", (64, "bf16"), ()
    yield "maps:build_vectors", (24,), ("MUFU",)
    yield from (("maps:build_accumulate", x, ()) for x in ACCUMULATED)
    yield from (("maps:build_load_from", x, ()) for x in LOADED_FROM)
    yield from (("maps:build_narrow", x, ("STG.E.128", "SHFL.BFLY")) for x in NARROW_STORES)
    yield from (("maps:build_global", x, ()) for x in ((64, "fp32"), (16, "bf16"), (32, "fp16")))


CASES = list(_cases())


def recipe(builder, args=()):
    """builder: ``"file:function"`` of tests/tile_kernels."""
    return Recipe(f"tests.helpers.tile.kernels.{builder}", tuple(args), sources=("tests.helpers.tile.cases",))


def name(builder, args):
    """A test id."""
    return "-".join([builder.replace(":build_", ":")] + [_short(x) for x in args])


def _short(x):
    if isinstance(x, Product):
        fields = [x.form, x.a_dtype, x.b_dtype, f"n{x.n}", f"k{x.k}", f"parts{x.a_parts}x{x.b_parts}", f"sw{x.swizzle}"]
        fields += [f"span{x.span[0]}to{x.span[1]}"] if x.span else []
        return "-".join(fields + [f for f in ("registers", "twice", "loop") if getattr(x, f)])
    return str(x)
