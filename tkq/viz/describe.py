"""What draws a kernel's pipeline."""
from .pipeline import Pipeline


def pipeline(kernel) -> Pipeline:
    """A picture of a block's roles, of the pipes between them, their stages, and which role arrives where how often.

    Args:
        kernel: an instance of a kernel's class, as it is compiled: the forward of attention, the GEMMs in 16 bits and
            in fp8, grouped too, linear attention by chunks, any subclass of ``tkq.RowKernel`` or ``tkq.tile.LCF``; or
            of a class of one's own with a method ``describe()`` that returns a ``Pipeline``; or a ``Recipe`` of one of
            these.
    Raises:
        NotImplementedError: a kernel without a description. TypeError: a class.

    Example::

        from tkq.warmup import catalog

        print(viz.pipeline(catalog.select(["gemm_bf16_kk_bf16_tma_128x256"])[0].recipe))
    """
    from ..runtime.compile import build
    from ..runtime.compile.recipe import Recipe

    if isinstance(kernel, type):
        raise TypeError(f"pipeline: kernel is the class {kernel.__name__}, allowed are its instances and recipes")
    if isinstance(kernel, Recipe):
        kernel = build._made(kernel)[0]
    if hasattr(kernel, "describe"):
        return kernel.describe()
    known = _beside()
    for base in type(kernel).__mro__:
        describe = known.get(f"{base.__module__}.{base.__qualname__}")
        if describe is not None:
            return describe(kernel)
    names = ", ".join(name.rpartition(".")[2] for name in known)
    raise NotImplementedError(f"pipeline: kernel is a {type(kernel).__name__}, supported are {names}, what is derived "
                              "from them, and classes with a method describe() that returns a viz.Pipeline")


def _beside() -> dict:
    """{class: what describes it, a function in a module beside it}"""
    from .pipelines import attention, gemm, lcf, linear_attention, rows

    return {
        "tkq.attention.forward.kernel.AttentionForward": attention.describe,
        "tkq.gemm.dense.kernel.DenseGemm": gemm.describe,
        "tkq.gemm.fp8.kernel.Fp8Gemm": gemm.describe_fp8,
        "tkq.gemm.fp8.kernel.WithCounter": gemm.describe_with_counter,
        "tkq.gemm.grouped.kernel.GroupedGemm": gemm.describe_fp8,
        "tkq.linear_attention.engine.kernel.LinearAttention": linear_attention.describe,
        "tkq.rows.persistent.kernel.RowKernel": rows.describe,
        "tkq.tile.lcf.LCF": lcf.describe,
    }
