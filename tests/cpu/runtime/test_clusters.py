"""What tkq asks the driver by ctypes, beside what cuda.bindings says of its numbers and structures."""
import pytest

from tkq.runtime.device import clusters
from tkq.runtime.device import driver as ours

driver = pytest.importorskip("cuda.bindings.driver")


def test_the_drivers_numbers():
    attributes = driver.CUfunction_attribute
    assert clusters._MOST_SHARED == attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert clusters._ANY_CLUSTER == attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
    assert clusters._CLUSTER == driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    assert ours._RELAXED == driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED


def test_a_launch_config_is_laid_out_as_the_drivers():
    value, attribute, config = driver.CUlaunchAttributeValue(), driver.CUlaunchAttribute(), driver.CUlaunchConfig()
    value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = 8, 9, 10
    attribute.id, attribute.value = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, value
    config.gridDimX, config.gridDimY, config.gridDimZ = 1, 2, 3
    config.blockDimX, config.blockDimY, config.blockDimZ = 4, 5, 6
    config.sharedMemBytes, config.attrs, config.numAttrs = 7, [attribute], 1
    seen = clusters._Config.from_address(config.getPtr())
    assert (*seen.grid, *seen.block, seen.shared, seen.stream, seen.count) == (1, 2, 3, 4, 5, 6, 7, None, 1)
    assert seen.attributes[0].id == clusters._CLUSTER and list(seen.attributes[0].value[:3]) == [8, 9, 10]
