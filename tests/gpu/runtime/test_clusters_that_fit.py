"""How many clusters of blocks run at once, by the driver's word."""
import pytest

from tkq.runtime.device import arch, clusters


@pytest.mark.parametrize("cluster, threads", ((1, 128), (2, 512), (4, 1024), (8, 512), (16, 512)))
def test_as_many_as_there_is_room_for(cluster, threads):
    found, most = clusters.resident("cuda:0", cluster, threads), arch.num_sms("cuda:0") // cluster
    assert most // 2 < found <= most
