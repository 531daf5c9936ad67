"""How many clusters of blocks a device runs at once: not its processors divided by the cluster, because a cluster stays
within a GPC, and not all GPCs have as many processors."""
import functools
from contextlib import contextmanager

from . import arch

_PROBE = b".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry probe() { ret; }\0"
_ALONE = 120 << 10  # bytes of shared memory that leave no room for a second block


def resident(device, cluster: int, threads: int) -> int:
    """Clusters of ``cluster`` blocks of ``threads`` threads, one block to a processor."""
    return arch.processors(device) if cluster == 1 else _asked(arch._index(device), cluster, threads)


@functools.cache
def _asked(index: int, cluster: int, threads: int) -> int:
    """The driver's answer, for a kernel that does nothing: whatever fits on a processor of its own fits as well."""
    from cuda.bindings import driver

    with _context(driver, index):
        module = _checked(driver.cuModuleLoadData(_PROBE))
        try:
            return _most(driver, _checked(driver.cuModuleGetFunction(module, b"probe")), cluster, threads)
        finally:
            driver.cuModuleUnload(module)


def _most(driver, probe, cluster, threads):
    attributes = driver.CUfunction_attribute
    _checked(driver.cuFuncSetAttribute(probe, attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, _ALONE))
    _checked(driver.cuFuncSetAttribute(probe, attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1))
    value = driver.CUlaunchAttributeValue()
    value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = cluster, 1, 1
    dimension = driver.CUlaunchAttribute()
    dimension.id, dimension.value = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, value
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = cluster, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = _ALONE
    config.attrs, config.numAttrs = [dimension], 1
    return _checked(driver.cuOccupancyMaxActiveClusters(probe, config))


@contextmanager
def _context(driver, index):
    """PyTorch's context, in whatever thread this is (autograd has its own)."""
    device = _checked(driver.cuDeviceGet(index))
    _checked(driver.cuCtxPushCurrent(_checked(driver.cuDevicePrimaryCtxRetain(device))))
    try:
        yield
    finally:
        driver.cuCtxPopCurrent()
        driver.cuDevicePrimaryCtxRelease(device)


def _checked(result):
    """A driver call's result, or RuntimeError."""
    error, *values = result
    if error.value:
        raise RuntimeError(f"the CUDA driver could not say how many clusters of blocks fit: {error.name}")
    return values[0] if values else None
