"""The rule by which numerics are judged: at most twice PyTorch's own error at the same precision."""
import torch


def assert_2x(ours, truth, same_precision, ulps=1.0, what="", bias_ulps=0.0, cancelled=0.0):
    """max |ours - truth| <= 2 max |same_precision - truth| + ulps units in the last place of the largest value; and no
    bias: the mean signed error is small beside PyTorch's mean error.

    bias_ulps: units in the last place by which all results may be off in one direction, where that is known and why.
    cancelled: where the result is what is left of two float32 numbers, the larger one: an ulp of it is allowed too.
    truth: float64 (or float32); same_precision: PyTorch's result at ours' precision. Not finite where truth is not."""
    assert ours.shape == truth.shape, f"{what}: shape {tuple(ours.shape)}, expected {tuple(truth.shape)}"
    if not ours.numel():
        return
    truth, theirs, mine = truth.double(), same_precision.double(), ours.double()
    finite = torch.isfinite(truth)
    nans, infinite = torch.isnan(truth), torch.isinf(truth)
    found = int(torch.isnan(mine).sum())
    assert torch.equal(torch.isnan(mine), nans), f"{what}: NaN in {found} places, expected {int(nans.sum())}"
    assert torch.equal(mine[infinite], truth[infinite]), f"{what}: infinities differ"
    if not finite.any():
        return
    error, peer = (mine - truth)[finite], (theirs - truth)[finite].nan_to_num(0.0, 0.0, 0.0)
    ulp = torch.finfo(ours.dtype).eps * truth[finite].abs().max().item()
    rest = torch.finfo(torch.float32).eps * cancelled
    limit = 2 * peer.abs().max().item() + ulps * ulp + rest
    worst = error.abs().max().item()
    theirs = peer.abs().max().item()
    assert worst <= limit, f"{what}: error {worst:.3e}, allowed {limit:.3e} (PyTorch {theirs:.3e})"
    noise = peer.abs().mean().item() + (ulp + rest) * 0.25
    allowed = noise * (0.1 + 5 / error.numel() ** 0.5) + bias_ulps * ulp
    bias = error.mean().item()
    assert abs(bias) <= allowed, f"{what}: mean signed error {bias:.3e}, allowed {allowed:.3e}"
