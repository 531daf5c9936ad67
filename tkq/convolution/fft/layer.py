"""tkq.nn.HyenaFilterConv: a long convolution whose filter a small network makes of positions."""
from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from tkq.convolution.fft.check import MOST
from tkq.convolution.fft.ops import fft_conv
from tkq.runtime import arguments
from tkq.runtime.arguments.tables import choice, number
from tkq.runtime.call import check

NAME = "HyenaFilterConv"
_options = arguments.checker_of(NAME, number("fast", 16.0), number("slow", 1.0),
                                choice("precision", "half", "half", "split"))


class HyenaFilterConv(nn.Module):
    """The long convolution of Hyena (arXiv 2302.10866): `tkq.fft_conv`, causal, with a filter for each head that a
    network makes of the positions, under a window that decays,

        k[h, t] = net(t, cos, sin)[h] exp(-a[h] t / max_tokens),      y = post_gate * (k * v + d v),  v = pre_gate * u

    so the parameters' number does not depend on the tokens'. The network has sines for activations; a goes from fast to
    slow over the heads and is no parameter. All parameters are float32, and so is the filter: u's type is its own.

    Args:
        heads: of u: channels, each with a filter of its own. max_tokens: the longest u.
        hidden: the network's width. bands: frequencies of cos and sin.
        fast, slow: numbers of a, of the first and of the last head.
        device: of the parameters. precision: as of `tkq.fft_conv`.

    Raises:
        TypeError, ValueError: heads, max_tokens, hidden or bands is no int from 1 on; fast or slow is no finite number;
            precision is another word.
        NotImplementedError: more than 2^24 heads.

    Example::

        conv = tkq.nn.HyenaFilterConv(512, 4096, device="cuda")
        y = conv(torch.randn(2, 512, 4096, device="cuda", dtype=torch.bfloat16))  # (2, 512, 4096) bfloat16
    """

    def __init__(self, heads: int, max_tokens: int, hidden: int = 64, bands: int = 4, fast: float = 16.0,
                 slow: float = 1.0, device=None, precision: str = "half"):
        super().__init__()
        for name, n in (("heads", heads), ("max_tokens", max_tokens), ("hidden", hidden), ("bands", bands)):
            check.size(f"{NAME}: {name}", n)
        if heads > MOST:
            raise NotImplementedError(f"{NAME}: heads is {heads}, supported are up to {MOST}")
        fast, slow, precision = _options(fast, slow, precision)
        new = dict(device=device, dtype=torch.float32)
        self.heads, self.max_tokens, self.bands = heads, max_tokens, bands
        self.first = nn.Linear(1 + 2 * bands, hidden, **new)
        self.second = nn.Linear(hidden, hidden, **new)
        self.last = nn.Linear(hidden, heads, bias=False, **new)
        self.d = nn.Parameter(torch.ones(heads, **new))
        self.fast, self.slow, self.precision = fast, slow, precision

    def filter(self, tokens: int) -> Tensor:
        """k (heads, tokens) float32, the beginning of the longest one."""
        with torch.autocast("cuda" if self.d.is_cuda else "cpu", enabled=False):  # of meta there is none
            t = torch.arange(tokens, device=self.d.device, dtype=torch.float32) / self.max_tokens
            angles = 2 * math.pi * t[:, None] * 2.0 ** torch.arange(self.bands, device=t.device)
            x = torch.cat((t[:, None], angles.cos(), angles.sin()), 1)
            k = self.last(self.second(self.first(x).mul(8).sin()).sin())
            decay = torch.linspace(self.fast, self.slow, self.heads, device=t.device)
            return (k * torch.exp(-t[:, None] * decay)).mT.contiguous()

    def forward(self, u: Tensor, pre_gate: Tensor | None = None, post_gate: Tensor | None = None) -> Tensor:
        """y (B, heads, L) of u's type; u and the gates (B, heads, L), as `tkq.fft_conv` has them.

        Raises: what `tkq.fft_conv` does; TypeError: parameters that were converted from float32, as by
        ``module.bfloat16()`` (torch.autocast keeps them); ValueError: an L above max_tokens."""
        if self.d.dtype != torch.float32 or self.first.weight.dtype != torch.float32:
            raise TypeError(f"{NAME}: parameters are {self.first.weight.dtype}, allowed is float32: the filter is")
        check.tensor(f"{NAME}: u", u)
        check.rank(f"{NAME}: u", u, 3)
        check.shape(f"{NAME}: u", u, (None, self.heads, None))
        if u.shape[2] > self.max_tokens:
            raise ValueError(f"{NAME}: u: has {u.shape[2]} tokens, allowed are up to max_tokens, {self.max_tokens}")
        return fft_conv(u, self.filter(u.shape[2]), self.d, True, pre_gate, post_gate, self.precision)

    def extra_repr(self) -> str:
        return (f"heads={self.heads}, max_tokens={self.max_tokens}, fast={self.fast}, slow={self.slow}, "
                f"precision={self.precision!r}")
