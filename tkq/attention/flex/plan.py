"""From what was asked for to how the kernel is built: pure Python."""
from tkq.attention.flex.spec import FlexSpec
from tkq.attention.forward.config import AttentionConfig
from tkq.runtime.compile.recipe import Recipe


def plan(spec: FlexSpec) -> AttentionConfig:
    """A tile of rows for each consumer warpgroup; two of them share a listed block's 128 rows."""
    consumers = spec.q_tile // 64
    return AttentionConfig(kv=spec.kv_tile, consumers=consumers, ping_pong=consumers > 1).check(
        spec.head_dim, spec.head_dim)


def recipe(spec: FlexSpec, config: AttentionConfig | None = None) -> Recipe:
    """Of the forward's kernel, with its planned configuration or another one."""
    return Recipe("tkq.attention.flex.kernel:FlexForward", (spec, config or plan(spec)))
