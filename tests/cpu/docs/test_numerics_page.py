"""What docs/numerics.md says of the gradients of attention, calculated anew."""
import re
from pathlib import Path

import torch

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "numerics.md").read_text()
ROWS, DIM = 700, 128


def rounded(x):
    return x.to(torch.bfloat16).double()


def exact(x):
    return x


def gradients(q, k, v, do, p_as, difference_as, ds_as, others_as=exact):
    """The gradients of q and k in float64, where these are rounded: P, dP - delta, dS, and every intermediate."""
    scale = DIM ** -0.5
    p = others_as(torch.softmax(others_as(others_as(q @ k.T) * scale), -1))
    dp, o = others_as(do @ v.T), others_as(p @ v)
    difference = difference_as(dp - others_as((do * o).sum(-1, keepdim=True)))
    ds = ds_as(others_as(p_as(p) * difference))
    return ds @ k * scale, ds.T @ q * scale


def test_errors_of_gradients_are_as_calculated():
    given = re.search(r"an error of (\S+)\. It would be (\S+) with P rounded, (\S+) with dP - delta rounded as well, "
                      r"and (\S+) with every intermediate in bf16", " ".join(PAGE.split()))
    generator = torch.Generator().manual_seed(0)
    inputs = [rounded(torch.randn(ROWS, DIM, generator=generator, dtype=torch.float64)) for _ in range(4)]
    truth = gradients(*inputs, exact, exact, exact)
    ways = ((exact, exact, rounded), (rounded, exact, rounded), (rounded, rounded, rounded), (rounded,) * 4)
    for said, way in zip(map(float, given.groups()), ways, strict=True):
        for found, wanted in zip(gradients(*inputs, *way), truth, strict=True):
            assert abs((found - wanted).norm() / wanted.norm() / said - 1) < 0.05
