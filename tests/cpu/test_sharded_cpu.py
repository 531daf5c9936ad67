"""Every op on DTensors, and with parameters that FSDP2 shards, on one rank (gloo)."""
import pytest
import torch
from torch.distributed.tensor import Shard

from tests import every_op_sharded as sharded
from tests.every_op import CASES, WITH_GRADIENTS, of_each

pytestmark = pytest.mark.filterwarnings("error")

# Where the rules let a dimension of the first tensor stay sharded; elsewhere all is gathered.
STAY = {"rmsnorm": (0,), "rmsnorm, with a residual": (0,), "rmsnorm, of heads": (0, 1), "layernorm": (0,),
        "rmsnorm_quant": (0,), "softmax": (0,), "log_softmax": (0,), "cross_entropy, of each row": (0,),
        "swiglu": (0, 1), "geglu": (0,), "rope": (0, 2), "rope, of packed sequences": (1,), "rope_qk": (0,),
        "flash_attn": (0, 2), "flash_attn, with sinks": (0,), "flash_attn_varlen": (1,), "gemm": (0,), "fp8_gemm": (0,),
        "gemm, with an epilogue": (0,)}


@pytest.fixture(scope="module")
def mesh():
    with sharded.one_rank("cpu") as mesh:
        yield mesh


@of_each(CASES.values())
def test_on_dtensors(mesh, case):
    if case.name not in STAY:
        sharded.on_dtensors(case, mesh, "cpu")
    for dimension in STAY.get(case.name, ()):
        found = sharded.on_dtensors(case, mesh, "cpu", dimension)
        assert found[0].placements == (Shard(dimension),)


@of_each(WITH_GRADIENTS)
def test_fully_sharded(mesh, case):
    sharded.fully_sharded(case, mesh, "cpu")


def test_tensor_parallel(mesh):
    sharded.tensor_parallel(mesh, "cpu")


def test_every_op_has_a_rule():
    from tkq.integrations import dtensor  # here: the tests above have it brought by their first call

    registered = {name.partition("::")[2].partition(".")[0] for name in torch._C._dispatch_get_all_op_names()
                  if name.startswith("tkq::")}
    assert set(dtensor.RULES) == registered


@pytest.mark.slow
def test_two_ranks(tmp_path):
    torch.multiprocessing.spawn(sharded.of_two_ranks, (f"file://{tmp_path}/ranks", STAY), 2)
