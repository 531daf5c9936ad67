"""GEMMs with operands or outputs at any address and row pitch: the cases and their inputs.

What lies beside a row is NaN in an operand. A case is named by M x N x K, then by matrix: "p" and by how many elements
its pitch is more than a row, "o" and the offset of its base, "t" where columns are contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain

import torch

BF16 = torch.bfloat16


@dataclass(frozen=True)
class Lies:
    """How a matrix lies: by rows or by columns ("t"), its pitch beyond the length of those, its first element."""

    more: int = 0
    first: int = 0
    turned: bool = False

    @property
    def name(self) -> str:
        return "t" * self.turned + f"p{self.more}" + f"o{self.first}" * (self.first > 0)

    def make(self, rows: int, cols: int, batches: int = 0, fill: float = float("nan"), device="cuda") -> torch.Tensor:
        """(rows, cols), or (batches, rows, cols), not initialised, in memory that is full of ``fill``."""
        lines, length = (cols, rows) if self.turned else (rows, cols)
        pitch, each = length + self.more, lines * (length + self.more)
        buffer = torch.full((self.first + max(1, batches) * each + 16,), fill, dtype=BF16, device=device)
        x = buffer.as_strided((max(1, batches), lines, length), (each, pitch, 1), self.first)
        x = x.mT if self.turned else x
        return x if batches else x[0]


PLAIN, TURNED = Lies(), Lies(turned=True)


@dataclass(frozen=True)
class Product:
    """at_least: how fast beside torch; batches: 0 for matrices."""

    m: int
    n: int
    k: int
    a: Lies = PLAIN
    b: Lies = PLAIN
    out: Lies = PLAIN
    batches: int = 0
    at_least: float = 1.0
    what: str = field(default="", compare=False)

    @property
    def name(self) -> str:
        batch = f"B{self.batches} " if self.batches else ""
        return f"{batch}{self.m}x{self.n}x{self.k} a {self.a.name} b {self.b.name} out {self.out.name}"

    @property
    def flops(self) -> float:
        return 2.0 * max(1, self.batches) * self.m * self.n * self.k

    def inputs(self, i: int) -> tuple:
        """a, b, out: whose memory is NaN before the first call."""
        g = torch.Generator("cuda").manual_seed(i)
        a, b = self.a.make(self.m, self.k, self.batches), self.b.make(self.k, self.n, self.batches)
        for x in (a, b):
            x.copy_(torch.randn(x.shape, device="cuda", dtype=BF16, generator=g))
        return a, b, self.out.make(self.m, self.n, self.batches)

    def error(self, inputs: tuple, output: torch.Tensor) -> float:
        """Relative, of the first and the last rows; NaN where something beside the result's rows was written."""
        a, b, out = (x if x.dim() == 3 else x[None] for x in inputs)
        rows = [*range(min(64, self.m)), *range(max(0, self.m - 64), self.m)]
        wanted = a[-1][rows].float() @ b[-1].float()
        beside = out.as_strided((self.m, self.out.more), (out.stride(1), 1), out.storage_offset() + self.n)
        if self.out.more and not torch.isnan(beside).all():
            return float("nan")
        return ((out[-1][rows].float() - wanted).norm() / wanted.norm()).item()


HEAD = Product(2048, 1024, 50256, Lies(1), at_least=1 / 0.6, what="a head's gradient, vocabulary not padded")
CUBE = (4096, 4096, 4096)
CUBES = tuple(chain(
    (Product(*CUBE, a=Lies(more, first)) for more, first in ((1, 0), (8, 1), (2, 2), (4, 4))),
    (Product(*CUBE, b=Lies(more, first)) for more, first in ((1, 0), (8, 1))),
    (Product(*CUBE, b=Lies(1, 1, True)), Product(*CUBE, Lies(3, 1, True)),
     Product(*CUBE, Lies(3, 1, True), Lies(5, 3))),
    (Product(*CUBE, Lies(1, 1), Lies(1, 1)), Product(*CUBE, Lies(1, 1), Lies(1, 1), Lies(1, 1))),
    (Product(*CUBE, b=b, out=Lies(more, first)) for b in (PLAIN, TURNED) for more, first in ((1, 0), (8, 1))),
    (Product(4096, n, 4096, b=TURNED) for n in (4095, 4097)),
    (Product(4096, 4095, 4096), Product(4095, 4096, 4096, Lies(0, 0, True))),
))
BATCHES = (Product(1024, 1024, 1024, Lies(1), Lies(3, 1), batches=16), Product(1024, 1023, 1024, batches=16))
VOCABULARY = (
    Product(4096, 50257, 1024, b=TURNED, what="a head"),
    Product(4096, 1024, 50257, what="its gradient, of x"),
    Product(50257, 1024, 4096, TURNED, what="its gradient, of the weight"),
)
CASES = (HEAD, *CUBES, *BATCHES, *VOCABULARY)
SMALL = tuple(chain.from_iterable(
    (Product(*size, Lies(1)), Product(*size, b=Lies(1)), Product(*size, Lies(1), Lies(1)), Product(*size, out=Lies(1)))
    for size in ((128, 128, 128), (256, 256, 256), (512, 512, 512), (1024, 1024, 1024), (16, 1024, 1024),
                 (16, 8192, 8192), (256, 1024, 256), (2048, 64, 2048))))
