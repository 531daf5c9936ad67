"""How many launches a call makes: kernels, copies and memsets. For `tkq.testing.timing`."""

from __future__ import annotations

import warnings

import torch


def work_nodes(graph: int) -> int | None:
    """Kernels, copies and memsets in a captured graph; None where cuda-python cannot say."""
    try:
        from cuda.bindings import runtime

        kinds = runtime.cudaGraphNodeType
        work = (kinds.cudaGraphNodeTypeKernel, kinds.cudaGraphNodeTypeMemcpy, kinds.cudaGraphNodeTypeMemset)
        handle = runtime.cudaGraph_t(graph)
        error, _, count = runtime.cudaGraphGetNodes(handle)
        if error != runtime.cudaError_t.cudaSuccess:
            return None
        _, nodes, count = runtime.cudaGraphGetNodes(handle, count)
        return sum(runtime.cudaGraphNodeGetType(node)[1] in work for node in nodes[:count])
    except Exception:  # another version of the bindings: the launches are not known then, the times are
        return None


def profiled(call, inputs) -> float | None:
    """GPU activities of one eager call by PyTorch's profiler; None where it cannot run."""
    try:
        from torch.profiler import ProfilerActivity, profile

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says that it forgets earlier cycles: there is one
            with profile(activities=[ProfilerActivity.CUDA]) as record:
                call(*inputs)
                torch.cuda.synchronize()
            return float(sum(e.device_type == torch.autograd.DeviceType.CUDA for e in record.events()))
    except Exception:
        return None
