"""The kernels of chunked prefill that tkq itself can choose, and what their machine code must show."""
import itertools
from dataclasses import replace

from tkq.attention.decode.chunked.launch import recipe
from tkq.attention.decode.chunked.plan import cache_plan, plan
from tkq.attention.decode.chunked.spec import CacheSpec
from tkq.attention.forward.spec import AttentionSpec
from tkq.runtime.compile.expectation import Expectation
from tkq.runtime.compile.recipe import Shipped


def shipped() -> list:
    """Of bf16 and groups of 4: pages of 16, of 64 and of whole tiles, and plain caches; with lse, a window, and other
    heads."""
    return [Shipped(_name(*of), recipe(*of), expectation(*of), quick) for *of, quick in _chosen()]


def _chosen():
    base = AttentionSpec("bf16", 128, True, False, varlen=True, pack=4)
    for ragged, page in itertools.product((False, True), (16, 64, 256)):
        yield base, cache_plan(base, page, ragged, True), ragged and page == 16
    yield base, cache_plan(base, None, False, True), False
    for spec in replace(base, lse=True), replace(base, left=True, long_window=True):
        yield spec, cache_plan(spec, 16, True, True), False
    for dim in 64, 256:
        spec = replace(base, head_dim=dim, head_dim_v=dim)
        yield spec, cache_plan(spec, 16, True, True), False


def _name(spec: AttentionSpec, cache: CacheSpec) -> str:
    parts = ["chunked_prefill", spec.dtype, f"d{spec.head_dim}", f"pack{spec.pack}"]
    parts += [f"paged{cache.box}" if cache.paged else "rows"] + ["ragged"] * cache.ragged + ["window"] * spec.left
    return "-".join(parts + ["lse"] * spec.lse)


def expectation(spec: AttentionSpec, cache: CacheSpec) -> Expectation:
    """Tensor cores not serialised, TMA in, registers handed from the producers to the consumers."""
    out = () if plan(spec, cache).o_from_registers else ("UTMASTG", "STSM")
    copies = "UTMALDG.5D" if cache.row_groups else "UTMALDG.4D"
    return Expectation(tensor=20, instructions=(copies, "USETMAXREG", *out))
