"""Which of the forward's kernels serves a call: that of heads of up to 256 columns, or that of wider ones."""
from tkq.attention.forward import plan as forward
from tkq.attention.forward.spec import HEAD_DIMS, AttentionSpec
from tkq.attention.wide import plan as wide
from tkq.attention.wide.spec import WideSpec


def spec_of(dtype: str, head_dim: int, head_dim_v: int, **options):
    """The AttentionSpec or WideSpec of these head dims; options: its other fields.

    Raises:
        NotImplementedError: what no kernel takes, by name.
    """
    if max(head_dim, head_dim_v) <= HEAD_DIMS[-1]:
        return AttentionSpec(dtype, head_dim, head_dim_v=head_dim_v, **options)
    if head_dim != head_dim_v:
        raise NotImplementedError(f"flash_attn: head_dim is {head_dim} and head_dim_v {head_dim_v}, beyond "
                                  f"{HEAD_DIMS[-1]} they must be the same")
    return WideSpec(dtype, head_dim, **options)


def plan(spec, length: str = "medium"):
    """The configuration of either kernel."""
    return _of(spec).plan(spec, length)


def recipe(spec, config):
    """Of either kernel."""
    return _of(spec).recipe(spec, config)


def _of(spec):
    return wide if isinstance(spec, WideSpec) else forward
