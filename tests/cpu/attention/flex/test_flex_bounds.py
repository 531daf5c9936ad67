"""What a mask's blocks are, where no GPU is needed: bounds beside the elements, the kernel's own code on the CPU."""
import itertools
import random

import pytest
import torch

from tests.helpers.attention import flex_gallery as gallery
from tests.helpers.emulation.flex_states import BlockStatesOnCpu, OrderBlocksOnCpu, function
from tkq.attention.flex.block_masks.bounds import Bounds, Kinds, over_block, parts
from tkq.attention.flex.block_masks.create import _states_cpu
from tkq.attention.flex.functions.graph import Builder
from tkq.attention.flex.functions.trace import Traced, trace
from tkq.attention.flex.launch import captured
from tkq.attention.flex.lists import ordered
from tkq.attention.flex.operands import BlockLists, MaskSizes
from tkq.attention.flex.spec import StatesSpec
from tkq.reference.graphs import values

B, H, S = 2, 2, 150
GALLERY = gallery.gallery(B, H, S, "cpu", torch.Generator().manual_seed(0))
MASKS = [name for name, (_, mask_mod) in GALLERY.items() if mask_mod is not None]
LOW, HIGH = -(1 << 31), (1 << 31) - 1


def blocks_of(traced, queries, keys):
    """(bounds of the mask over a block, its elements). queries, keys: ranges."""
    at = {"b": torch.tensor(1), "h": torch.tensor(1), "q": torch.tensor(queries).view(-1, 1), "kv": torch.tensor(keys)}
    at = {name: x.int() for name, x in at.items()}
    found = values(*traced, at)
    known = {i: ends(found[i]) for i in parts(traced.graph)}
    return over_block(traced.graph, known, Kinds(int, bool, lambda n: ends(torch.tensor([n]).float()).low)), found[-1]


def ends(x):
    if x.dtype is torch.bool:
        return Bounds(x.all().item(), x.any().item())
    if x.dtype is torch.float32:
        if x.isnan().any():
            return Bounds(LOW, HIGH)
        bits = (x + 0.0).view(torch.int32)
        x = torch.where(bits < 0, bits ^ HIGH, bits)
    return Bounds(x.min().item(), x.max().item())


def check(traced, queries, keys) -> bool:
    """Bounds hold. Do they settle the block?"""
    (surely, possibly), seen = blocks_of(traced, queries, keys)
    assert not surely or seen.all(), traced.graph.text()
    assert possibly or not seen.any(), traced.graph.text()
    return surely or not possibly


@pytest.mark.parametrize("name", [*MASKS, "floats of both indices", "floats as whole numbers"])
def test_bounds_hold(name):
    traced = trace("mask_mod", OTHERS[name] if name in OTHERS else GALLERY[name][1])
    for row, column in itertools.product(range(0, S, 16), range(0, S, 8)):
        check(traced, range(row, min(row + 16, S)), range(column, min(column + 8, S)))


@pytest.mark.parametrize("name", ["causal", "document", "natten", "prefix_lm", "sliding_window",
                                  "floats of both indices"])
def test_what_is_left_open(name):
    """Of common masks those blocks alone that are partly seen."""
    traced = trace("mask_mod", OTHERS[name] if name in OTHERS else GALLERY[name][1])
    blocks = [range(i, i + 15) for i in range(0, S, 15)]
    for queries, keys in itertools.product(blocks, blocks):
        seen = blocks_of(traced, queries, keys)[1]
        assert check(traced, queries, keys) == bool(seen.all() or not seen.any())


HARD = (torch.tensor([LOW, HIGH, 0, -1, 7, HIGH - 3] * 6, dtype=torch.int32),
        torch.tensor([-(1 << 63), (1 << 63) - 1, 1 << 40, 0, -5, 1 << 62] * 6),
        torch.tensor([0.0, -0.0, float("nan"), float("inf"), -1.5, -float("inf"), 1e-40] * 5 + [2.0]),
        torch.arange(36) % 3 == 0, torch.arange(36) // 12 == 1)
KINDS = "i32", "i64", "f32", "bool", "bool"
DTYPES = "int32", "int64", "fp32", "bool", "bool"


def drawn(seed):
    """A mask of random operations on indices and on elements of hard tensors."""
    draw, build = random.Random(seed), Builder()
    indices = [build.add("input", "i32", name) for name in ("q", "kv")]
    pool = {kind: [] for kind in ("i32", "i64", "f32", "bool")}
    pool["i32"] += indices * 2 + [build.const(draw.choice([0, 3, LOW, HIGH, 20]), "i32")]
    for slot, (kind, dtype) in enumerate(zip(KINDS, DTYPES)):
        pool[kind] += [build.add("load", kind, slot, dtype, 1, i) for i in indices]
    pool["f32"].append(build.const(0.0, "f32"))
    for _ in range(14):
        kind = draw.choice(("i32", "i64", "f32", "bool", "bool"))
        pick = lambda kind: draw.choice(pool[kind])
        op = draw.choice({"i32": ("add", "sub", "neg", "abs", "min", "max", "mul", "where", "xor", "floordiv"),
                          "i64": ("add", "sub", "neg", "abs", "min", "max", "cast", "where"),
                          "f32": ("where", "add", "cast", "max"),
                          "bool": ("and", "or", "xor", "not", "where", "eq", "ne", "compare", "compare")}[kind])
        if op == "where":
            made = build.where(pick("bool"), pick(kind), pick(kind))
        elif op == "cast":
            made = build.cast(pick("i32"), kind)
        elif op == "compare":
            of = draw.choice(("i32", "i64", "f32"))
            made = build.binary(draw.choice(("lt", "le", "gt", "ge", "eq", "ne")), pick(of), pick(of))
        elif op == "floordiv":
            made = build.binary(op, pick(kind), build.const(3, "i32"))
        elif op in ("neg", "abs", "not"):
            made = build.unary(op, pick(kind))
        else:
            made = build.binary(op, pick(kind), pick(kind))
        pool[kind].append(made)
    both = build.binary("xor", pool["bool"][-1], pool["bool"][-2])
    graph, tensors, _ = build.finish(build.binary(draw.choice(("and", "or")), both, pool["bool"][-3]))
    return Traced(graph, tuple(HARD[i] for i in tensors), ())


def test_drawn_bounds_hold():
    settled = 0
    for seed in range(60):
        traced = drawn(seed)
        for q, kv, n in itertools.product((0, 6, 17, 30), (0, 3, 30), (1, 6)):
            settled += check(traced, range(q, q + n), range(kv, kv + n))
    assert settled > 400


def states_by(kernel, traced, sizes, shape, run):
    found = torch.full(shape, 77, dtype=torch.int8)
    kernel(found, captured(traced), sizes, run)
    return found


FLOATS = torch.tensor([0.0, -0.0, float("nan"), 2.5, -float("inf"), 3.0, 1e-40, 9.0] * 20)
TABLE = (torch.arange(500).view(-1, 1) // 64 + torch.arange(500) // 60) % 3 == 0
OTHERS = {
    "of both indices": lambda b, h, q, kv: TABLE[q, kv],
    "of_every_type": gallery.of_every_type(500, "cpu"),
    "floats": lambda b, h, q, kv: (FLOATS[q // 8] <= FLOATS[kv // 8]) | (FLOATS[kv] != FLOATS[kv]) & (q > 99),
    "keys alone": lambda b, h, q, kv: kv < 70 + b,
    "floats of both indices": lambda b, h, q, kv: ((q - kv).abs() < 49.5 + h) | ((q.long() - kv).float() > 1e9 * b),
    "floats as whole numbers": lambda b, h, q, kv: (
        ((q - kv).float().int() < 40 + b) ^ (torch.minimum(q, kv).float().long() > 30 * h)),
    "no index": lambda b, h, q, kv: h == b,
    "wide": lambda b, h, q, kv: (q.long() * (1 << 40) - (kv.long() << 40)).abs() < (h + 1).long() * (1 << 45)}


@pytest.mark.parametrize("name", ["causal", "prefix_document", "dilated", *OTHERS, 7, 25])
def test_states_of_the_kernel(monkeypatch, name):
    if isinstance(name, int):
        traced = drawn(name)
    else:
        traced = trace("mask_mod", OTHERS[name] if name in OTHERS else GALLERY[name][1])
    kernel = function(BlockStatesOnCpu(StatesSpec(traced.graph)), monkeypatch)
    for queries, keys, rows, columns, run in ((450, 500, 7, 9, 2), (S - 7, S, 64, 64, 3), (36, 36, 6, 6, 2),
                                              (9, 130, 200, 3, 2)):
        sizes, shape = MaskSizes(queries, keys, rows, columns), (B, H, -(-queries // rows), -(-keys // columns))
        found = states_by(kernel, traced, sizes, shape, run)
        assert torch.equal(found, _states_cpu(traced, shape, sizes, found.device)), (queries, keys, rows, columns)


def test_lists_of_the_kernel(monkeypatch):
    """Of rows and of columns, with more and with fewer states than are loaded at a time."""
    kernel = function(OrderBlocksOnCpu(True), monkeypatch)
    for rows, columns in ((5, 21), (16, 8), (1, 1)):
        states = torch.randint(0, 3, (B, H, rows, columns), dtype=torch.int8)
        found = [BlockLists(*(torch.full(shape[:n], -7, dtype=torch.int32) for n in (3, 4, 3, 4)))
                 for shape in (states.shape, states.mT.shape)]
        kernel(states, *found)
        for ours, wanted in zip(found, (ordered(states), ordered(states.mT))):
            assert all(map(torch.equal, ours, wanted))
