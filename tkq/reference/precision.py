"""In which precision the references compute."""
import torch
from torch import Tensor


def _upcast(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
