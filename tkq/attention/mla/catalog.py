"""The kernels of MLA decoding that tkq itself can choose, and what their machine code must show."""
import itertools
from dataclasses import replace

from tkq.attention.mla.config import MlaConfig
from tkq.attention.mla.launch import recipe
from tkq.attention.mla.plan import loaded, plan
from tkq.attention.mla.spec import MlaSpec
from tkq.runtime.compile.expectation import Expectation
from tkq.runtime.compile.recipe import Shipped


def shipped() -> list:
    """Of bf16: pages of any size, and of whole tiles for one block or two; one query or several, with the
    log-sum-exp and without. And lists of rows, with and without lengths of sequences or of queries;
    float8 rows without the log-sum-exp."""
    pages = [(spec, blocks) for blocks in (0, 1, 2) for spec in _specs()]
    lists = [(MlaSpec("bf16", lse=lse, sparse=True, lengths=n), 0) for n in range(3) for lse in (False, True)]
    float8 = [replace(spec, float8=True) for spec, blocks in pages + lists if not blocks and not spec.lse]
    return [Shipped(_name(spec, blocks), recipe(spec, loaded(blocks)), expectation(blocks))
            for spec, blocks in pages + lists] + [
                Shipped(_name(spec, 0), recipe(spec, plan(spec)), expectation(3)) for spec in float8]


def _specs():
    for edges, lse in itertools.product((False, True), repeat=2):
        yield MlaSpec("bf16", edges, lse)


def _name(spec: MlaSpec, blocks: int) -> str:
    pages = "pages", "tiles", "shared_tiles"
    keys = ("rows", "rows_of_sequences", "rows_of_queries")[spec.lengths] if spec.sparse else pages[blocks]
    dtype = "e4m3" if spec.float8 else spec.dtype
    return "-".join(["mla_decode", dtype, keys] + ["edges"] * spec.edges + ["lse"] * spec.lse)


def expectation(blocks: int) -> Expectation:
    """36 steps of S = Q K', four of each quarter of P V; copies past L1, 16 bytes each, or TMA, for one block or two;
    the fourth widens what was copied. And the kernel that merges."""
    few, scores, values = MlaConfig().registers
    copies = "LDGSTS.E.BYPASS", "UTMALDG.3D", "UTMALDG.3D.MULTICAST", "F2FP.F16.E4M3.UNPACK_B"
    merge = Expectation(instructions=("LDG.E.128", "ACQBULK"), registers=72)
    return Expectation(tensor=52, instructions=(copies[blocks], "USETMAXREG"), registers=128,
                       roles=((few, 1), (scores, 1), (values, 2)), others=(("ombine", merge),))
