"""The kernels of attention over a cache that tkq itself can choose, and what their machine code must show."""
import itertools
from dataclasses import replace

from tkq.attention.decode.chunked import catalog as chunked
from tkq.attention.decode.launch import BALANCER, LISTER, PLANNER, recipe
from tkq.attention.decode.plan import plan
from tkq.attention.decode.spec import AppendSpec, DecodeSpec, MergeSpec
from tkq.runtime.compile.expectation import Expectation
from tkq.runtime.compile.recipe import Shipped

# no lanes by themselves ask for what all lanes of a warp have to ask for together
_planning = Expectation(instructions=("STG.E",), registers=64, absent=("BRA.DIV",))
_narrow = Expectation(instructions=("LDG.E.128", "STG.E.64"), registers=48, absent=("ATOM", "BAR"))


def shipped() -> list:
    """Of bf16, as models have them: heads of 128 and 64, paged, one query or several; caches of float8 with scales of
    heads and of tokens; ragged queries; tree masks; shared prefixes; kv_append with and without a rotation; the planner
    and the merge of two states."""
    found = [Shipped(_name(s), recipe(s), expectation(s)) for s in _decoding()]
    plain = Expectation(instructions=("LDG.E.128", "STG.E.128"), registers=48, absent=("ATOM", "BAR"))
    turned = AppendSpec("bf16", "int64", "fp32", False, "int64", True)
    for spec in (AppendSpec("bf16"), turned, *(replace(turned, cache="e4m3", scales=s) for s in ("head", "token"))):
        name = ["kv_append", spec.dtype, spec.slots] + ["rope"] * bool(spec.table) + _of_float8(spec)
        found.append(Shipped("-".join(name), recipe(spec), _narrow if spec.cache else plain))
    parts = Expectation(instructions=("LDG.E.NA.LTC128B.128", "STG.E.64"), registers=80, absent=("ATOM", "BAR"))
    return found + [*chunked.shipped(), Shipped("merge_state-bf16", recipe(MergeSpec("bf16")), plain),
                    Shipped("merge_state-bf16-parts", recipe(MergeSpec("bf16", True)), parts),
                    *(Shipped(f"plan_decode-{what}", made, _planning)
                      for what, made in (("int32", PLANNER), ("latent", BALANCER), ("ragged", LISTER)))]


def _decoding():
    for dim, edges, lse in itertools.product((128, 64), (False, True), (False, True)):
        yield DecodeSpec("bf16", dim, dim, edges=edges, lse=lse)
    for dim in 128, 64:
        yield DecodeSpec("bf16", dim, dim, lse=True, in_parts=True)
    for few, scales in itertools.product((True, False), ("head", "token")):
        yield DecodeSpec("bf16", 128, 128, edges=not few, cache="e4m3", scales=scales, few=few)
    yield DecodeSpec("bf16", 128, 128, edges=True, ragged=True)
    yield DecodeSpec("bf16", 128, 128, tree=True)


def _of_float8(spec) -> list:
    return [spec.cache, spec.scales] if spec.cache else []


def _name(s: DecodeSpec) -> str:
    parts = ["decode", s.dtype, f"d{s.head_dim}", "paged" if s.paged else "rows"]
    parts += ["edges"] * s.edges + ["lse"] * s.lse + _of_float8(s)
    parts += ["ragged"] * s.ragged + ["few"] * s.few + ["tree"] * s.tree
    return "-".join(parts + ["parts"] * s.in_parts)


def expectation(s: DecodeSpec) -> Expectation:
    """Products of two places each: a segment's first or last block, and all others. Copies past L1, 16 bytes each; of
    float8 loads past L1, and one conversion for two numbers."""
    config = plan(s)
    if s.few:
        return Expectation(instructions=("LDG.E.NA.LTC128B.128", "F2FP.F16.E4M3.UNPACK_B", "HMMA.16816.F32", "MOVM"),
                           absent=("HGMMA", "SYNCS"), registers=255)
    products = 2 * (s.head_dim // 16 + config.keys // 16)
    copies = ("LDG.E.NA.LTC128B.128", "F2FP.F16.E4M3.UNPACK_B", "STS.128") if s.cache else ("LDGSTS.E.BYPASS",)
    return Expectation(tensor=products, instructions=(*copies, "USETMAXREG"), registers=255)
