"""The kernels of chunked prefill that tkq itself can choose, and what their machine code must show."""
import itertools
from dataclasses import replace

from tkq.attention.decode.chunked.launch import recipe
from tkq.attention.decode.chunked.plan import box_rows, plan
from tkq.attention.decode.chunked.spec import CacheSpec
from tkq.attention.forward.spec import AttentionSpec
from tkq.runtime.compile.expectation import Expectation
from tkq.runtime.compile.recipe import Shipped


def shipped() -> list:
    """Of bf16 and groups of 4: pages of 16, of 64 and of whole tiles, and plain caches; with lse, a window, and other
    heads."""
    return [Shipped(_name(*of), recipe(*of), expectation(of[0], of[1].row_groups), quick) for *of, quick in _chosen()]


def _chosen():
    base = AttentionSpec("bf16", 128, True, False, varlen=True, pack=4)
    for ragged, page in itertools.product((False, True), (16, 64, 256)):
        yield base, CacheSpec(True, ragged, box_rows(plan(base).kv, page), True), ragged and page == 16
    yield base, CacheSpec(False, False, plan(base).kv), False
    for spec in replace(base, lse=True), replace(base, left=True, long_window=True):
        yield spec, CacheSpec(True, True, box_rows(plan(spec).kv, 16), True), False
    for dim in 64, 256:
        spec = replace(base, head_dim=dim, head_dim_v=dim)
        yield spec, CacheSpec(True, True, box_rows(plan(spec).kv, 16), dim > 64), False


def _name(spec: AttentionSpec, cache: CacheSpec) -> str:
    parts = ["chunked_prefill", spec.dtype, f"d{spec.head_dim}", f"pack{spec.pack}"]
    parts += [f"paged{cache.box}" if cache.paged else "rows"] + ["panels"] * (
        cache.paged and not cache.row_groups) + ["ragged"] * cache.ragged + ["window"] * spec.left
    return "-".join(parts + ["lse"] * spec.lse)


def expectation(spec: AttentionSpec, groups: bool) -> Expectation:
    """Tensor cores not serialised, TMA in, registers handed from the producers to the consumers."""
    out = () if plan(spec).o_from_registers else ("UTMASTG", "STSM")
    return Expectation(tensor=20, instructions=("UTMALDG.5D" if groups else "UTMALDG.4D", "USETMAXREG", *out))
