"""What a caller of the GEMM asked for: the part that decides which code is compiled. Pure Python."""
from dataclasses import dataclass

from ..epilogue.spec import PLAIN, Epilogue

DTYPES = ("bf16", "fp16")
OUT_DTYPES = ("bf16", "fp16", "fp32")
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
PATHS = ("tma", "direct")
WAYS_OUT = ("tma", "rows", "direct")
BATCHES = ("", "ab", "a", "b")
TMA_BYTES = 16  # bases and pitches that TMA takes are multiples of it


@dataclass(frozen=True)
class GemmSpec:
    """out = f(a @ b) with a (M, K), b (K, N), out (M, N) whose rows are contiguous; gated, (M, N / 2).

    dtype: of a and b. out: of the result. a_major, b_major: the dimension that is contiguous, "k", or "m" and "n".
    load: how a and b come in, store: how the result goes out: "tma", or "elements" for strides and bases that TMA
    cannot take; store "rows": the same, a row's neighbours at a time.
    accumulate: out += a @ b. What is added is rounded to its type, and the sum again.
    epilogue: the f above. batch: "" for matrices; otherwise everything has a batch in front, but of a and b only those
    named here: the other one serves all.

    Raises:
        NotImplementedError: a value that no kernel takes, by name.
    """

    dtype: str = "bf16"
    out: str = "bf16"
    a_major: str = "k"
    b_major: str = "n"
    load: str = "tma"
    store: str = "tma"
    accumulate: bool = False
    epilogue: Epilogue = PLAIN
    batch: str = ""

    def __post_init__(self):
        allowed = {"dtype": DTYPES, "out": OUT_DTYPES, "a_major": ("k", "m"), "b_major": ("k", "n"), "load": PATHS,
                   "store": WAYS_OUT, "batch": BATCHES}
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise NotImplementedError(f"gemm: {name} is {getattr(self, name)!r}, supported are {', '.join(values)}")
        if self.load == "direct" and self.store != "direct":
            raise NotImplementedError("gemm: load is 'direct', and the kernel for it stores 'direct' only")
        if self.accumulate and self.store == "rows":
            raise NotImplementedError("gemm: store is 'rows' and accumulate is set, which 'tma' and 'direct' take")
        if self.accumulate and not self.epilogue.plain:
            raise NotImplementedError("gemm: accumulate is set, and supported with a plain epilogue only")
        if self.load == "tma" and self.epilogue.gate == "interleaved" and self.b_major == "n":
            raise NotImplementedError("gemm: activation is interleaved and b is row-major: TMA does not take every "
                                      "other column, load must be 'elements'")

    @property
    def transposed(self):
        """(a, b) as the tile layer's products name them: is a stored (K, M), is b stored (N, K)?"""
        return self.a_major == "m", self.b_major == "k"


def is_k_major(extent: int, stride: int, k_stride: int):
    """Whether a matrix's K is its contiguous dimension: True, False, or None where neither dimension is.

    extent, stride: of the other dimension. K's own extent is at least 8 and so says what its stride means; an extent
    of 1 makes a stride meaningless, and such a dimension counts as contiguous where K is not."""
    if k_stride == 1:
        return True
    return False if stride == 1 or extent == 1 else None


def fits_tma(address: int, pitch: int, lines: int, bytes: int) -> bool:
    """Whether TMA reads a matrix: its base, and the ``pitch``, in elements of ``bytes`` bytes, between its ``lines``.

    It reads whole units of 16 bytes, also past the end of a line: up to 7 neighbours, inside the pitch. Where M or N is
    contiguous they feed rows or columns of C that are not stored, and no other, NaN or not. Along K, where they would
    enter every sum, lines end with a unit, as K is a multiple of 8."""
    return address % TMA_BYTES == 0 and (lines == 1 or pitch * bytes % TMA_BYTES == 0)


def fits_tma_store(address: int, pitch: int, lines: int, length: int, bytes: int) -> bool:
    """Whether TMA writes a matrix and nothing else: it writes whole units of 16 bytes too, so lines, of ``length``
    elements, must end with one."""
    return length * bytes % TMA_BYTES == 0 and fits_tma(address, pitch, lines, bytes)
