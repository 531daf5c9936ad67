"""Every op on DTensors, and with parameters that FSDP2 shards, on one GPU (NCCL).
tests/cpu/integrations/test_sharded_cpu.py says where placements stay."""
import pytest

from tests.helpers.ops import every_op_sharded as sharded
from tests.helpers.ops.every_op import CASES

pytestmark = pytest.mark.slow  # a process group of NCCL takes its seconds


@pytest.fixture(scope="module")
def mesh():
    with sharded.one_rank("cuda") as mesh:
        yield mesh


def test_on_dtensors(mesh):
    for case in CASES.values():
        for dimension in (None, 0):
            sharded.on_dtensors(case, mesh, "cuda", dimension)


def test_fully_sharded(mesh):
    for case in CASES.values():
        if case.leaves:
            sharded.fully_sharded(case, mesh, "cuda")


def test_tensor_parallel(mesh):
    sharded.tensor_parallel(mesh, "cuda")
