"""runtime.new: tensors past the dispatcher, and where that way is closed."""
import pytest
import torch

from tkq.runtime import new


def test_a_tensor_without_a_gpu_comes_from_torch():
    x = new.floats(torch.zeros(3), (2, 5), (5, 1))
    assert x.shape == (2, 5) and x.stride() == (5, 1) and x.dtype == torch.float32 and x.device.type == "cpu"
    assert new.floats(torch.zeros(3), (), ()).shape == ()


@pytest.mark.parametrize("device, filling, short", ((0, False, True), (1, False, False), (0, True, False)))
def test_the_short_way_is_for_the_current_device_and_not_where_torch_fills(monkeypatch, device, filling, short):
    class Like:
        def get_device(self):
            return 0

    Like.device = torch.device("cpu")
    seen = []
    monkeypatch.setattr(new, "_strided", lambda *args: seen.append(args))
    monkeypatch.setattr(new, "_current", lambda: device)
    monkeypatch.setattr(new, "_filling", lambda: filling)
    found = new.floats(Like(), (4,), (1,))
    assert seen == ([((4,), (1,), torch.float32)] if short else [])
    assert short or found.shape == (4,)
