"""The kernels of attention over a cache that tkq itself can choose, and what their machine code must show."""
import itertools

from tkq.attention.decode.launch import PLANNER, recipe
from tkq.attention.decode.plan import plan
from tkq.attention.decode.spec import AppendSpec, DecodeSpec, MergeSpec
from tkq.runtime.compile.expectation import Expectation
from tkq.runtime.compile.recipe import Shipped


def shipped() -> list:
    """Of bf16, as models have them: heads of 128 and 64, paged, one query or several; kv_append with and without a
    rotation; the planner and the merge of two states."""
    found = [Shipped(_name(s), recipe(s), expectation(s)) for s in _decoding()]
    plain = Expectation(instructions=("LDG.E.128", "STG.E.128"), registers=48, absent=("ATOM", "BAR"))
    for spec in (AppendSpec("bf16"), AppendSpec("bf16", "int64", "fp32", False, "int64", True)):
        found.append(Shipped("-".join(["kv_append", spec.dtype, spec.slots] + ["rope"] * bool(spec.table)),
                             recipe(spec), plain))
    return found + [Shipped("merge_state-bf16", recipe(MergeSpec("bf16")), plain),
                    Shipped("plan_decode-int32", PLANNER, Expectation(instructions=("STG.E",), registers=64))]


def _decoding():
    for dim, edges, lse in itertools.product((128, 64), (False, True), (False, True)):
        yield DecodeSpec("bf16", dim, dim, edges=edges, lse=lse)


def _name(s: DecodeSpec) -> str:
    parts = ["decode", s.dtype, f"d{s.head_dim}", "paged" if s.paged else "rows"]
    return "-".join(parts + ["edges"] * s.edges + ["lse"] * s.lse)


def expectation(s: DecodeSpec) -> Expectation:
    """Products of two places each: a segment's first or last block, and all others. Copies past L1, 16 bytes each."""
    config = plan(s)
    products = 2 * (s.head_dim // 16 + config.keys // 16)
    return Expectation(tensor=products, instructions=("LDGSTS.E.BYPASS", "USETMAXREG"), registers=255)
