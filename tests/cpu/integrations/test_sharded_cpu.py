"""Every op on DTensors, and with parameters that FSDP2 shards, on one rank (gloo)."""
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import tkq
from tests.helpers.ops import every_op_checks as checks
from tests.helpers.ops import every_op_sharded as sharded
from tests.helpers.ops.every_op import CASES, WITH_GRADIENTS, of_each
from tests.helpers.ops.every_op_sharded import STAY, TURNED

pytestmark = pytest.mark.filterwarnings("error")


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
        assert found[0].placements == (Shard(3 - dimension if case.name in TURNED and dimension else dimension),)


@pytest.mark.parametrize("name", ["linear_attn, with checkpoints", "mamba2_ssd, with checkpoints",
                                  "mamba2_ssd, with a pool"])
def test_other_ops_of_a_function(mesh, name):
    """They have rules of their own; with gradients or more tensors that is slow."""
    sharded.on_dtensors(CASES[name], mesh, "cpu")


@of_each(WITH_GRADIENTS)
def test_fully_sharded(mesh, case):
    sharded.fully_sharded(case, mesh, "cpu")


def test_tensor_parallel(mesh):
    sharded.tensor_parallel(mesh, "cpu")


def test_every_op_has_a_rule():
    from tkq.integrations import dtensor  # here: the tests above have it brought by their first call

    registered = checks.registered()
    assert set(dtensor.RULES) == registered


@pytest.mark.slow
def test_two_ranks(tmp_path):
    torch.multiprocessing.spawn(sharded.of_two_ranks, (f"file://{tmp_path}/ranks", "cpu"), 2)


def rules():
    from tkq.integrations import dtensor

    return dtensor.RULES


def posed(*shape, placements=(), ranks=2):
    """What a rule sees of a tensor."""
    return SimpleNamespace(shape=shape, ndim=len(shape), placements=placements,
                           mesh=SimpleNamespace(size=lambda: ranks))


@pytest.mark.parametrize("placement, rows", [(Shard(0), [0]), (Shard(1), [1]), (Shard(2), []), (Replicate(), [])])
def test_what_goes_with_rstd_stays_where_it_lies(placement, rows):
    """One of 24 rows is another row where x of (4, 6) rows is sharded along the other dimension."""
    x = posed(4, 6, 16, placements=(placement,))
    g = SimpleNamespace(x=x, weight=posed(16), save=True, total_dtype=None, need_dx=True, need_dweight=True,
                        need_dbias=False, dresidual_dtype=None)
    assert [given["x"].dim for _, given in rules()["rmsnorm"](g)] == rows
    assert [given["x"].dim for _, given in rules()["norm_backward"](g)] == rows


@pytest.mark.parametrize("transpose", [False, True])
def test_scales_of_columns_need_all_rows(mesh, transpose):
    """Each rank's largest of a column, of its own rows, is not the column's."""
    x = distribute_tensor(torch.randn(32, 48), mesh, [Shard(0)])
    found = tkq.quantize_fp8(x, transpose=transpose)
    assert all(y.placements == ((Replicate(),) if transpose else (Shard(0),)) for y in found)
    assert all(torch.equal(sharded.whole_of(y).float(), z.float())
               for y, z in zip(found, tkq.quantize_fp8(x.full_tensor(), transpose=transpose), strict=True))


@pytest.mark.parametrize("kv_heads, allowed", [(3, False), (4, True)])
def test_heads_go_to_ranks_in_whole_groups(kv_heads, allowed):
    g = SimpleNamespace(q=posed(2, 64, 12, 64), k=posed(2, 64, kv_heads, 64), return_lse=True, need_dq=True,
                        need_dk=True, need_dv=True, need_dsinks=False)
    for op in ("flash_attn", "flash_attn_backward"):
        assert any(given.get("k") == Shard(2) for _, given in rules()[op](g)) == allowed


def test_tables_of_a_batch_go_with_it():
    g = SimpleNamespace(x=posed(4, 6, 2, 16), cos=posed(4, 6, 8), cu_seqlens=None, offsets=None, position_ids=None,
                        results=1)
    assert [given.get("cos") for _, given in rules()["rope"](g)] == [None, Shard(0)]
    g.x = posed(24, 2, 16)
    assert len(list(rules()["rope"](g))) == 1
