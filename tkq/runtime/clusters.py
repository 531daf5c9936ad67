"""How many clusters of blocks a device runs at once: not its processors divided by the cluster, because a cluster stays
within a GPC, and not all GPCs have as many processors."""
import functools

import torch

from . import arch

_PROBE = b".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry probe() { ret; }\0"


def resident(device, cluster: int, threads: int, smem: int) -> int:
    """Clusters of ``cluster`` blocks, one block to a processor. threads: of a block; smem: bytes of dynamic shared
    memory, so much that no second block fits beside it."""
    index = arch._index(device)
    return arch.processors(device) if cluster == 1 else _asked(index, cluster, threads, smem)


@functools.cache
def _asked(index: int, cluster: int, threads: int, smem: int) -> int:
    """The driver's answer, for a kernel that does nothing: one of ours, alone on its processor, fits as well."""
    from cuda.bindings import driver

    with torch.cuda.device(index):
        torch.cuda.current_stream().synchronize()  # there is a context now
        probe = _checked(driver.cuModuleGetFunction(_module(index), b"probe"))
        attributes = driver.CUfunction_attribute
        for attribute, value in ((attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, smem),
                                 (attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)):
            _checked(driver.cuFuncSetAttribute(probe, attribute, value))
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = cluster, arch.processors(torch.device("cuda", index)), 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = smem
        dimension = driver.CUlaunchAttribute()
        dimension.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        value = driver.CUlaunchAttributeValue()
        value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = cluster, 1, 1
        dimension.value = value
        config.attrs, config.numAttrs = [dimension], 1
        return _checked(driver.cuOccupancyMaxActiveClusters(probe, config))


@functools.cache
def _module(index: int):
    from cuda.bindings import driver

    return _checked(driver.cuModuleLoadData(_PROBE))


def _checked(result):
    error, *values = result
    if error.value:
        raise RuntimeError(f"the CUDA driver could not say how many clusters fit: {error.name}")
    return values[0] if values else None
