"""From torch tensors to the backward's kernels for wide heads."""
import torch

from tkq.attention.common.operands import Scalars
from tkq.attention.wide.backward.plan import STATS_ROWS, plan, recipe
from tkq.attention.wide.backward.spec import WideBackwardSpec
from tkq.attention.wide.spec import width
from tkq.runtime import function
from tkq.runtime.call import counters, dtypes
from tkq.runtime.device import arch

_launchers: dict = {}  # what decides the kernels -> (function, SMs); as many as kinds of call


def run(tensors, gradients, options, config=None):
    """Launch the kernels into gradients (dq or None, dk, dv), from (do, q, k, v, o, lse, dlse), with no more checks
    than the compiled function makes. config: of each pass, instead of the plan's.

    Returns a function that gives dlse - rowsum(o * do), (B, H, Sq) float32, and 0 for rows that see no key."""
    _, q, k, _, _, _, dlse = tensors
    batch, rows, heads, head_dim = q.shape
    causal, scale, left, right, softcap = options
    if softcap:
        raise NotImplementedError  # check_gradient_of has the words
    index, keys = q.get_device(), k.shape[1]
    left, right = left if left < keys - 1 else -1, 0 if causal else right if right < rows - 1 else -1
    key = q.dtype, width(head_dim), left < 0, right < 0, gradients[0] is None, dlse is None, index, config
    launcher = _launchers.get(key)
    if launcher is None:
        arch.require_hopper(q.device)
        spec = WideBackwardSpec(dtypes.name_of(q.dtype), key[1], left >= 0, right >= 0, gradients[0] is not None,
                                dlse is not None)
        launcher = _launchers[key] = function(recipe(spec, config or plan(spec))), arch.num_sms(q.device)
    kernel, num_sms = launcher
    padded = -(-rows // STATS_ROWS) * STATS_ROWS
    stats = torch.empty(2, batch, heads, padded, dtype=torch.float32, device=q.device)
    numbers = Scalars(head_dim**-0.5 if scale is None else scale, 0.0, left, right, num_sms)
    kernel(stats, tuple(tensors), tuple(gradients), counters.counter(index), numbers)
    return lambda: stats[1, :, :, :rows]
