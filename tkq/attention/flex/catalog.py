"""The kernels of attention with functions of the user's that are compiled ahead, and what their machine code must show:
of causal masks, with and without ALiBi or a softcap as scores; everything else is compiled when it is first asked
for."""
import itertools
from dataclasses import replace

from tkq.attention.flex.backward.plan import capture_plan, capture_recipe
from tkq.attention.flex.backward.plan import plan as backward_plan
from tkq.attention.flex.backward.plan import recipe as backward_recipe
from tkq.attention.flex.backward.spec import CaptureSpec, FlexBackwardSpec
from tkq.attention.flex.functions.capture_derivatives import capture_derivatives
from tkq.attention.flex.functions.derivative import derivative, joint
from tkq.attention.flex.functions.graph import Builder
from tkq.attention.flex.plan import lists_recipe, plan, recipe, states_recipe
from tkq.attention.flex.spec import WITH_GRADIENTS, FlexSpec, kv_tile_of
from tkq.runtime.compile.expectation import Expectation
from tkq.runtime.compile.recipe import Shipped


def causal():
    """q_idx >= kv_idx."""
    build = Builder()
    return build.finish(build.binary("ge", build.add("input", "i32", "q"), build.add("input", "i32", "kv")))[0]


def alibi():
    """score + slopes[h] * (kv_idx - q_idx)."""
    build = Builder()
    score, h = build.add("input", "f32", "score"), build.add("input", "i32", "h")
    slope = build.add("load", "f32", 0, "fp32", 1, h)
    far = build.binary("sub", build.add("input", "i32", "kv"), build.add("input", "i32", "q"))
    return build.finish(build.binary("add", score, build.binary("mul", slope, build.cast(far, "f32"))))[0]


def softcap():
    """cap * tanh(score / cap)."""
    build = Builder()
    cap, score = build.add("number", "f32", 0), build.add("input", "f32", "score")
    return build.finish(build.binary("mul", cap, build.unary("tanh", build.binary("div", score, cap))))[0]


QUICK = ("bf16", 64, "alibi"), ("bf16", 256, "softcap")  # forward; backward, that with the fewest registers left
BLOCK = 128  # queries and keys that a mask lists together
SCORES = {"none": lambda: None, "alibi": alibi, "softcap": softcap}


def shipped() -> list:
    """Names are unique: flex_attention, forward, backward or captured gradients, dtype, head dim, score."""
    mask, found = causal(), []
    for dtype, dim, (name, score) in itertools.product(("bf16", "fp16"), WITH_GRADIENTS, SCORES.items()):
        graph = score()
        keys = kv_tile_of(BLOCK, dim)
        spec = FlexSpec(dtype, dim, True, graph, mask, True, True, kv_tile=keys, kv_per=BLOCK // keys)
        config = plan(spec)
        found.append(Shipped(f"flex_attention_{dtype}_d{dim}_{name}", recipe(spec, config), Expectation(
            tensor=20, instructions=("UTMALDG", "USETMAXREG", *_out(config.o_from_registers))),
            quick=(dtype, dim, name) == QUICK[0]))
        functions = (graph, None) if graph is None or derivative(graph)[0] == 1.0 else (None, joint(graph)[0])
        spec = FlexBackwardSpec(dtype, dim, True, False, *functions, mask, True, True)
        config = backward_plan(spec)
        spec = replace(spec, q_per=BLOCK // config.tile, kv_per=BLOCK // config.block)
        found.append(Shipped(f"flex_attention_backward_{dtype}_d{dim}_{name}", backward_recipe(spec, config),
                             _of_backward(spec, config), quick=(dtype, dim, name) == QUICK[1]))
    for dtype, dim in itertools.product(("bf16", "fp16"), WITH_GRADIENTS):
        config = capture_plan(dim)
        of = FlexBackwardSpec(dtype, dim, False, False, alibi(), None, mask, True, True, q_per=BLOCK // config.tile,
                              kv_per=BLOCK // config.block)
        spec = CaptureSpec(of, capture_derivatives(alibi(), (0,)), (1,))
        found.append(Shipped(f"flex_attention_captures_{dtype}_d{dim}_alibi", capture_recipe(spec, config), Expectation(
            tensor=16, instructions=("UTMALDG", "USETMAXREG", "SHFL", "REDG"),
            others=(("BackwardPreprocess", Expectation(instructions=("LDG.E.128",))),))))
    found.append(Shipped("create_block_mask_causal", states_recipe(mask), Expectation(
        instructions=("STG.E", "VOTE"), absent=("LDS", "BAR", "LDG"))))
    for name, both in (("lists", False), ("lists_both", True)):
        found.append(Shipped(f"create_block_mask_{name}", lists_recipe(both), Expectation(
            instructions=("STG.E", "VOTE"), absent=("LDS", "BAR"))))
    return found


def _out(from_registers):
    """How results leave a kernel."""
    return ("STG.E.128",) if from_registers else ("UTMASTG", "STSM")


def _of_backward(spec, config):
    dq = ("REDG",) if config.dq_reduce == "atomic" else ("UBLKCP", "UBLKRED")
    kind = "joint" if spec.joint is not None else "none" if spec.score is None else "score"
    return Expectation(
        # beside a softcap's slope values wait on the stack that are needed once in a task, and four once in a tile; of
        # tiles of 128 queries three
        tensor=24, local_memory={(128, "joint"): 36, (64, "none"): 6, (256, "joint"): 4}.get((spec.width, kind), 0),
        instructions=("UTMALDG", "USETMAXREG", "STSM", *_out(config.store_from_registers), *dq), roles=config.roles,
        others=(("BackwardPreprocess", Expectation(instructions=("LDG.E.128",))),
                ("BackwardPostprocess", Expectation(instructions=("LDG.E.128", "STSM", "UTMASTG")))))
