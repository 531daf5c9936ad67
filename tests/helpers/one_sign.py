"""How far all of a result may be off in one direction where a single rounding is in many of its elements."""
import torch


def bias_of_one_sign(exact, peer, ulps):
    """For `assert_2x`'s bias_ulps: twice the mean size of PyTorch's errors, as if all had one sign, and `ulps`.

    In a recurrence the rounding of one token is in the gradients of all tokens before it, so that errors do not cancel
    in their mean; they are no larger for it. exact: float64. peer: PyTorch's. Both of one shape."""
    finite = torch.isfinite(exact)
    if not finite.any():
        return ulps
    exact = exact.where(finite, 0)
    ulp = torch.finfo(torch.float32).eps * exact.abs().max().item()
    error = (peer.double() - exact).where(finite, 0).nan_to_num(0.0, 0.0, 0.0).abs().sum().item() / int(finite.sum())
    return ulps + (2 * error / ulp if ulp else 0.0)
