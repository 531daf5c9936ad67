"""The kernels of Hedgehog's attention that tkq itself can choose, and what their machine code must show."""
from dataclasses import replace

from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.hedgehog.launch import keys_recipe, queries_recipe, recipe, window_recipe
from tkq.linear_attention.hedgehog.plan import key_plan, plan, query_plan, window_plan
from tkq.linear_attention.hedgehog.spec import PARTS, GradientSpec, HedgehogSpec, WindowSpec
from tkq.runtime.compile.expectation import Expectation
from tkq.runtime.compile.recipe import Shipped

LOADS = "UTMALDG", "UTMASTG", "USETMAXREG"
SPILLED = 24  # loads and stores of the sides of keys' gradients, outside of their products
SPILLED_OF_QUERIES = 56  # likewise of queries, addresses of the window's for the most part


def shipped() -> list:
    """Of bf16, as LoLCATS has it: 64 columns of a map."""
    found = []
    for D in (64, 128):
        spec, end = HedgehogSpec("bf16", D, 64), f"-bf16-d{D}-f64"
        found.append(Shipped(f"hedgehog{end}", recipe(spec), expectation(spec)))
        for part in PARTS[1:]:
            segment = replace(spec, part=part)
            found.append(Shipped(f"hedgehog_{part}{end}", recipe(segment), expectation(segment)))
        for part in (None, "outputs"):
            kept, name = replace(spec, part=part, keeps=True), "hedgehog_outputs" if part else "hedgehog"
            found.append(Shipped(f"{name}{end}-kept", recipe(kept), expectation(kept)))
        window = WindowSpec("bf16", D)
        found.append(Shipped(f"hedgehog_window_gradients-bf16-d{D}", window_recipe(window), of_window(window)))
        gradients = GradientSpec("bf16", D)
        found.append(Shipped(f"hedgehog_queries_gradients{end}", queries_recipe(gradients), of_queries(gradients)))
        found.append(Shipped(f"hedgehog_keys_gradients{end}", keys_recipe(gradients), of_keys(gradients)))
    return found


def expectation(spec: HedgehogSpec) -> Expectation:
    """Products of two chunks' scores, two maps, ones; of the state, weights of two chunks, what it takes up. Their
    waits are few: none serialises them. "states": a map, ones, what the state takes up. Where "outputs" keeps features,
    a thread of the weights has two numbers in local memory."""
    few, some, many = plan(spec).registers
    tokens, features = 64 // 16, spec.features // 16
    products = 4 * (spec.head_dim // 16) + 2 * tokens + 2 * features + 4 * tokens
    if spec.part == "states":
        products = spec.head_dim // 16 + 4 * tokens
    return Expectation(tensor=products, instructions=LOADS[::2] if spec.part == "states" else LOADS,
                       local_memory=8 * (spec.keeps and spec.part == "outputs"),
                       roles=((few, 1), (some, 1), (many, plan(spec).groups)))


def of_window(spec: WindowSpec) -> Expectation:
    """Products of scores and of what do gives, of two chunks each; of gradients of queries, keys and values."""
    few, *others = window_plan(spec).registers
    return Expectation(tensor=4 * (spec.head_dim // 16) + 8 * (spec.head_dim // 64) + 16,
                       instructions=(*LOADS[::2], "UTMAREDG"), roles=((few, 1), *((n, 1) for n in others)))


def of_queries(spec: GradientSpec) -> Expectation:
    """A side's: the state's part; what the state takes up, and sums; the map's gradient and dq, of both dy, and
    dq of two chunks' keys. The window's: scores and dp of two chunks."""
    few, many, some = query_plan(spec).registers
    columns, tokens = spec.head_dim // 16, CHUNK // 16
    return Expectation(tensor=columns + 8 * tokens + 4 * columns, instructions=LOADS,
                       local_memory=SPILLED_OF_QUERIES * (spec.head_dim == 128), roles=((few, 1), (many, 2), (some, 1)))


def of_keys(spec: GradientSpec) -> Expectation:
    """A side's: the state's part, scores, dp; what the state takes up. Of rows: dv, of both sides' features and of two
    chunks' weights; dk, of both dy and of two chunks' queries; the map's gradient, of both dy."""
    few, some, many = key_plan(spec).registers
    columns, tokens = spec.head_dim // 16, CHUNK // 16
    return Expectation(tensor=3 * columns + 11 * tokens, instructions=LOADS,
                       local_memory=SPILLED * (spec.head_dim == 128), roles=((few, 1), (some, 2), (many, 1)))
