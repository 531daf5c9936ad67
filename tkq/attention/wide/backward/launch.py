"""From torch tensors to the backward's kernels for wide heads."""
import torch

from tkq.attention.common.operands import Scalars
from tkq.attention.wide.backward.plan import plan, recipe
from tkq.attention.wide.backward.spec import WideBackwardSpec
from tkq.attention.wide.spec import width
from tkq.runtime import function
from tkq.runtime.call import counters, dtypes
from tkq.runtime.device import arch

_launchers: dict = {}  # what decides the kernels -> (function, SMs); as many as kinds of call


def run(tensors, gradients, options, lengths=None, config=None):
    """Launch the kernels into gradients (dq or None, dk, dv), from (do, q, k, v, o, lse, dlse), with no more checks
    than the compiled function makes. lengths: of varlen, as ``Lengths``. config: of each pass, instead of the plan's.

    Returns:
        (-lse * log2(e), dlse - rowsum(o * do)), (B, H, Sq) float32, of varlen (H, total); -inf and 0 for rows that see
        no key."""
    _, q, k, _, _, lse, dlse = tensors
    rows, _, head_dim = q.shape[-3:]
    causal, scale, left, right, softcap = options
    index, keys = q.get_device(), k.shape[-3]
    left, right = left if left < keys - 1 else -1, 0 if causal else right if right < rows - 1 else -1
    sequences = None if lengths is None else tuple(lengths[:4])
    more = lengths is not None, *[x is not None for x in (sequences or (None,) * 4)[2:]]
    key = (q.dtype, width(head_dim), left >= 0, right >= 0, gradients[0] is not None, dlse is not None, softcap > 0,
           *more, index, config)
    launcher = _launchers.get(key)
    if launcher is None:
        arch.require_hopper(q.device)
        spec = WideBackwardSpec(dtypes.name_of(q.dtype), *key[1:-2])
        launcher = _launchers[key] = function(recipe(spec, config or plan(spec))), arch.num_sms(q.device)
    kernel, num_sms = launcher
    stats = torch.empty(2, *(lse.shape if lengths is None else (1, *lse.shape)), dtype=torch.float32, device=q.device)
    numbers = Scalars(head_dim**-0.5 if scale is None else scale, softcap, left, right, num_sms)
    kernel(stats, tuple(tensors), tuple(gradients), sequences, counters.counter(index), numbers)
    return stats.view(2, *lse.shape)
