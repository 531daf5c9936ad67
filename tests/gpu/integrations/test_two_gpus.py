"""Every op on two GPUs, a process for each (NCCL): on DTensors that are sharded, in modules that FSDP2 shards, and in
torch's tensor parallelism. Of one process with two GPUs: test_every_op.py, test_replayed_calls.py."""
import pytest
import torch

from tests.helpers.ops import every_op_sharded as sharded


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_ranks(tmp_path):
    torch.multiprocessing.spawn(sharded.of_two_ranks, (f"file://{tmp_path}/ranks", "cuda"), 2)
