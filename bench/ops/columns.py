"""Linear attention and the delta rule with a gate for each column, exactly: what judges results of `linear_attention`
and `gated_delta_rule`."""

from __future__ import annotations

import torch

CHUNK = 64


def exactly(q, k, v, g, beta=None):
    """o of one sequence and head, in float64: q, k, g (S, K), v (S, V), beta (S,) or None. Chunk by chunk; decays are
    formed pair by pair, from differences of their logarithms."""
    q, k, v, g = (x.double() for x in (q, k, v, g))
    state, found, scale = v.new_zeros(k.shape[1], v.shape[1]), [], q.shape[1]**-0.5
    for at in range(0, len(q), CHUNK):
        c = slice(at, at + CHUNK)
        G = g[c].cumsum(0)
        decay = (G[:, None] - G).clamp(max=0).exp()
        p, u = torch.einsum("ik,jk,ijk->ij", q[c], k[c], decay).tril(), v[c]
        if beta is not None:
            b = beta[c, None].double()
            lower = b * torch.einsum("ik,jk,ijk->ij", k[c], k[c], decay).tril(-1)
            u = torch.linalg.solve_triangular(lower, b * (u - (k[c] * G.exp()) @ state), upper=False,
                                              unitriangular=True)
        found.append(scale * ((q[c] * G.exp()) @ state + p @ u))
        state = G[-1].exp()[:, None] * state + (k[c] * (G[-1] - G).exp()).T @ u
    return torch.cat(found)
