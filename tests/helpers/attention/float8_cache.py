"""Caches of float8 for the tests on a GPU: a cache of 16 bits, quantised; NaN (0x7f) wherever no key is."""
import torch

from tests.helpers.attention.kv_cache import Cache

E4M3, LARGEST, NAN = torch.float8_e4m3fn, 448.0, 0x7F


def float8(cache: Cache, scales=None, factor=None) -> tuple:
    """(the cache in e4m3, k_descale and v_descale as a call takes them). Its keys are what the numbers mean, in
    float64.

    scales: of each "head", "sequence" and head, or "token" and head; None: none. factor: what scales of tokens are
    multiplied by, of their place in the sequence, so that the largest number of a token is 448 no more."""
    made, names = [_like(x) for x in (cache.k, cache.v)], ("k_descale", "v_descale")
    keys, descales = [[] for _ in cache.keys], {}
    for i, (new, name) in enumerate(zip(made, names)):
        of = [x[i].float() for x in cache.keys]
        descale = _descale(of, scales, cache, new)
        for b, x in enumerate(of):
            where = _where(cache, b, len(x), new)
            if scales == "token":
                by = x.abs().amax(-1) / LARGEST
                if factor is not None:
                    by = by * factor(torch.arange(len(x), device=x.device))[:, None]
                descale[where] = by
            elif scales:
                by = (descale if scales == "head" else descale[b]).expand(len(x), -1)
            else:
                by = x.new_ones(x.shape[:2])
            low = (x / by[..., None]).clamp(-LARGEST, LARGEST).nan_to_num(0.0).to(E4M3)
            new.view(torch.uint8)[where] = low.view(torch.uint8)
            keys[b].append(low.double() * by.double()[..., None])
        if scales:
            descales[name] = descale
    return Cache(*made, cache.table, cache.lengths, [tuple(x) for x in keys]), descales


def _like(x):
    new = torch.empty_strided(x.shape, x.stride(), dtype=E4M3, device=x.device)
    new.view(torch.uint8).fill_(NAN)
    return new


def _where(cache, b, length, new):
    """(pages, rows) of a sequence's keys."""
    at = torch.arange(length, device=new.device)
    if cache.table is None:
        return torch.full_like(at, b), at
    return cache.table[b].long()[at // new.shape[1]], at % new.shape[1]


def _descale(of, scales, cache, new):
    heads = new.shape[2]
    top = torch.stack([x.abs().amax((0, 2)) if len(x) else x.new_ones(heads) for x in of]) / LARGEST
    if scales == "token":
        return torch.full(new.shape[:3], float("nan"), device=new.device)
    if scales == "sequence":  # those of no key are not looked at
        top = top.where(cache.lengths[:, None] > 0, float("nan"))
    return {"head": top.amax(0), "sequence": top, None: None}[scales]
