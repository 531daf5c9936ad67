"""The kernels of Hedgehog's attention that tkq itself can choose, and what their machine code must show."""
from dataclasses import replace

from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.finish.launch import recipe as dots_recipe
from tkq.linear_attention.finish.spec import RowDotsSpec, lanes
from tkq.linear_attention.hedgehog.config import WindowConfig
from tkq.linear_attention.hedgehog.launch import feature_recipe, recipe, window_recipe
from tkq.linear_attention.hedgehog.plan import feature_plan, plan
from tkq.linear_attention.hedgehog.spec import OF, PARTS, FeatureSpec, HedgehogSpec, WindowSpec
from tkq.runtime.compile.expectation import Expectation
from tkq.runtime.compile.recipe import Shipped

LOADS = "UTMALDG", "UTMASTG", "USETMAXREG"


def shipped() -> list:
    """Of bf16, as LoLCATS has it: 64 columns of a map."""
    found = []
    for D in (64, 128):
        spec, end = HedgehogSpec("bf16", D, 64), f"-bf16-d{D}-f64"
        found.append(Shipped(f"hedgehog{end}", recipe(spec), expectation(spec)))
        for part in PARTS[1:]:
            segment = replace(spec, part=part)
            found.append(Shipped(f"hedgehog_{part}{end}", recipe(segment), expectation(segment)))
        window = WindowSpec("bf16", D)
        found.append(Shipped(f"hedgehog_window_gradients-bf16-d{D}", window_recipe(window), of_window(window)))
        for of in OF:
            features = FeatureSpec("bf16", D, of)
            found.append(Shipped(f"hedgehog_{of}_gradients{end}", feature_recipe(features), of_features(features)))
        delta = RowDotsSpec("bf16", D, "fp32", lanes(D))
        found.append(Shipped(f"hedgehog_delta-bf16-d{D}", dots_recipe(delta), Expectation(instructions=("LDG.E.128",))))
    return found


def expectation(spec: HedgehogSpec) -> Expectation:
    """Products of two chunks' scores, two maps, ones; of the state, weights of two chunks, what it takes up. Their
    waits are few: none serialises them. "states": a map, ones, what the state takes up."""
    few, some, many = plan(spec).registers
    tokens, features = 64 // 16, spec.features // 16
    products = 4 * (spec.head_dim // 16) + 2 * tokens + 2 * features + 4 * tokens
    if spec.part == "states":
        products = spec.head_dim // 16 + 4 * tokens
    return Expectation(tensor=products, instructions=LOADS[::2] if spec.part == "states" else LOADS,
                       roles=((few, 1), (some, 1), (many, plan(spec).groups)))


def of_window(spec: WindowSpec) -> Expectation:
    """Products of scores and of what do gives, of two chunks each; of gradients of queries, keys and values."""
    few, *others = WindowConfig().registers
    return Expectation(tensor=4 * (spec.head_dim // 16) + 8 * (spec.head_dim // 64) + 16,
                       instructions=(*LOADS[::2], "UTMAREDG"), roles=((few, 1), *((n, 1) for n in others)))


def of_features(spec: FeatureSpec) -> Expectation:
    """The state's: the map's gradient, of two places; features, what they add. The gradients': features, what the state
    gives, two sides of it; dx; of keys dv."""
    few, some, many = feature_plan(spec).registers
    columns, tokens = spec.head_dim // 16, CHUNK // 16
    products = 2 * tokens + columns + tokens + 3 * columns + tokens + 2 * tokens * (spec.of == "keys")
    return Expectation(tensor=products, instructions=LOADS, roles=((few, 1), (some, 2), (many, 1)))
