"""Pictures of how a kernel is laid out, on a machine without a GPU: what threads hold, how shared memory is swizzled,
which role waits for which, which passes over memory an operation takes.

    from tkq import viz

    viz.tv_layout(kernel)  # which thread holds which elements of a ReductionBase kernel's tile
    viz.shared_tile(tile)  # where a shared tile's elements are, line by line and bank by bank
    viz.pipeline(kernel)   # a block's roles, its pipes and their stages, and which role arrives where how often
    viz.fft_passes(262144) # the launches of a long convolution, and what lies in memory between them

Each returns a ``Picture``: in a notebook it draws itself; ``print`` gives it as text for a terminal; ``save`` writes
.svg, .txt or, where matplotlib is installed, .png. Nothing is launched; the layouts are those that the kernels are
compiled with.
"""
from .describe import pipeline
from .drawing import Picture
from .layouts import tv_layout
from .passes import Passes, fft_passes
from .pipeline import Pipe, Pipeline, Role
from .tiles import shared_tile

__all__ = ["Passes", "Picture", "Pipe", "Pipeline", "Role", "fft_passes", "pipeline", "shared_tile", "tv_layout"]
