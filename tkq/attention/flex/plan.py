"""From what was asked for to how the kernel is built: pure Python."""
from tkq.attention.flex.functions.graph import Graph
from tkq.attention.flex.spec import FlexSpec, StatesSpec
from tkq.attention.forward.config import AttentionConfig
from tkq.attention.forward.plan import plan as attention_plan
from tkq.runtime.compile.recipe import Recipe


def plan(spec: FlexSpec, length: str = "medium") -> AttentionConfig:
    """A tile of rows for each consumer warpgroup, of which two share a listed block's 128 rows; in ping-pong
    where ``flash_attn`` is. length: class of the keys' number. Of more than 128 columns there is room for one tile
    of Q, and none for O, beside two of K and V."""
    consumers = spec.q_tile // 64
    if spec.head_dim > 128:
        return AttentionConfig(kv=spec.kv_tile, consumers=consumers, q_stages=1, o_from_registers=True,
                               ping_pong=False).check(spec.head_dim, spec.head_dim)
    ping_pong = consumers > 1 and attention_plan(spec.attention, length).ping_pong
    return AttentionConfig(kv=spec.kv_tile, consumers=consumers, ping_pong=ping_pong).check(spec.head_dim,
                                                                                            spec.head_dim)


def recipe(spec: FlexSpec, config: AttentionConfig) -> Recipe:
    """Of the forward's kernel."""
    return Recipe("tkq.attention.flex.kernel:FlexForward", (spec, config))


def states_recipe(mask: Graph) -> Recipe:
    """Of the kernel that finds out what each block of a mask is."""
    return Recipe("tkq.attention.flex.block_masks.states:BlockStates", (StatesSpec(mask),))


def lists_recipe(both: bool) -> Recipe:
    """Of the kernel that makes lists of these, of rows; both: and of columns."""
    return Recipe("tkq.attention.flex.block_masks.order:OrderBlocks", (both,))
