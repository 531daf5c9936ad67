"""The kernels of Hedgehog's attention that tkq itself can choose, and what their machine code must show."""
from tkq.linear_attention.hedgehog.config import WindowConfig
from tkq.linear_attention.hedgehog.launch import recipe, window_recipe
from tkq.linear_attention.hedgehog.plan import plan
from tkq.linear_attention.hedgehog.spec import HedgehogSpec, WindowSpec
from tkq.linear_attention.launch import recipe as linear_recipe
from tkq.linear_attention.plan import plan as linear_plan
from tkq.linear_attention.spec import LinearSpec
from tkq.runtime.compile.expectation import Expectation
from tkq.runtime.compile.recipe import Shipped

LOADS = "UTMALDG", "UTMASTG", "USETMAXREG"


def shipped() -> list:
    """Of bf16, as LoLCATS has it: 64 columns of a map; and what the gradients take of linear attention."""
    found = []
    for D in (64, 128):
        spec, end = HedgehogSpec("bf16", D, 64), f"-bf16-d{D}-f64"
        found.append(Shipped(f"hedgehog{end}", recipe(spec), expectation(spec)))
        window = WindowSpec("bf16", D)
        found.append(Shipped(f"hedgehog_window_gradients-bf16-d{D}", window_recipe(window), of_window(window)))
        for name, K, V in (("dq", D, 128), ("dk", D, 128), ("dv", 128, D)):
            if (name, D) == ("dv", 128):  # as that of dk
                continue
            of = LinearSpec("bf16", K, V, reverse=name != "dq", others=True)
            found.append(Shipped(f"hedgehog_{name}{end}", linear_recipe(of), of_others(of)))
    return found


def expectation(spec: HedgehogSpec) -> Expectation:
    """Products of two chunks' scores, two maps, ones; of the state, weights of two chunks, what it takes up. Their
    waits are few: none serialises them."""
    few, some, many = plan(spec).registers
    tokens, features = 64 // 16, spec.features // 16
    products = 4 * (spec.head_dim // 16) + 2 * tokens + 2 * features + 4 * tokens
    return Expectation(tensor=products, instructions=LOADS,
                       roles=((few, 1), (some, 1), (many, plan(spec).groups)))


def of_others(spec: LinearSpec) -> Expectation:
    """Two products a chunk: the state with queries, and what it takes up; the source has five waits for them, of at
    least eight instructions."""
    few, some, many = linear_plan(spec).registers
    return Expectation(tensor=spec.head_dim // 16 + 64 // 16, waits_per_mma=0.7, instructions=LOADS,
                       roles=((few, 1), (some, 1), (many, linear_plan(spec).groups)))


def of_window(spec: WindowSpec) -> Expectation:
    """Products of scores and of what do gives, of two chunks each; of gradients of queries, keys and values."""
    few, *others = WindowConfig().registers
    return Expectation(tensor=4 * (spec.head_dim // 16) + 8 * (spec.head_dim // 64) + 16, instructions=LOADS,
                       roles=((few, 1), *((n, 1) for n in others)))
