"""How many clusters of blocks a device runs at once: not its SMs divided by the cluster, because a cluster stays
within a GPC, and not all GPCs have as many SMs. Asked of the driver by ctypes: a first call does not wait
until cuda.bindings is imported, and a machine that runs a bundle need not have it."""
import ctypes
import functools

from . import arch, driver

_PROBE = b".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry probe() { ret; }\0"
_ALONE = 120 << 10  # bytes of shared memory that leave no room for a second block
_MOST_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_ANY_CLUSTER = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
_CLUSTER = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute, of a cluster's size."""

    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
                ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)), ("count", ctypes.c_uint))


def resident(device, cluster: int, threads: int) -> int:
    """Clusters of ``cluster`` blocks of ``threads`` threads, one block to an SM."""
    index = arch._index(device)
    if cluster == 1 or index < 0:  # below 0: of a dry run, in which it decides nothing
        return arch.num_sms(device) // cluster
    return _queried(index, cluster, threads)


@functools.cache
def _queried(index: int, cluster: int, threads: int) -> int:
    """The driver's answer, for a kernel that does nothing: whatever fits on an SM of its own fits as well."""
    module, probe = ctypes.c_void_p(), ctypes.c_void_p()
    with driver.context(index):
        driver.ask("cuModuleLoadData", ctypes.byref(module), _PROBE)
        try:
            driver.ask("cuModuleGetFunction", ctypes.byref(probe), module, b"probe")
            return _most(probe, cluster, threads)
        finally:
            driver.ask("cuModuleUnload", module)


def _most(probe, cluster, threads):
    driver.ask("cuFuncSetAttribute", probe, ctypes.c_int(_MOST_SHARED), ctypes.c_int(_ALONE))
    driver.ask("cuFuncSetAttribute", probe, ctypes.c_int(_ANY_CLUSTER), ctypes.c_int(1))
    attribute = _Attribute(_CLUSTER, 0, (cluster, 1, 1))
    config = _Config((cluster, 1, 1), (threads, 1, 1), _ALONE, None, ctypes.pointer(attribute), 1)
    found = ctypes.c_int()
    driver.ask("cuOccupancyMaxActiveClusters", ctypes.byref(found), probe, ctypes.byref(config))
    return found.value
