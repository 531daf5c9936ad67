"""Score functions with captured tensors that require gradients, for tests on CPU and GPU."""
import torch

from tests.helpers.attention import flex_gallery as gallery


def shared(S):
    def of(of_keys, slopes, of_queries, relative, temperature):
        """Elements that many scores read: of heads, keys, queries, diagonals; one twice."""
        def score_mod(score, b, h, q, kv):
            score = score * (1 + 0.1 * of_keys[h, kv]) + slopes[h] * (kv - q) * 0.01 + of_queries[q]
            far = (q - kv).clamp(-40, 40)  # all diagonals of a warp are one element, or each is
            return score + relative[far + S - 1] + relative[kv].sin() * torch.exp(temperature)
        return score_mod
    return of


def tables(ids):
    def of(bias, table):
        """Elements by the document, from the end; of each score its own; in half precision."""
        def score_mod(score, b, h, q, kv):
            return 5 * torch.tanh((score + bias[h, q, kv]) / 5) + table[ids[q] - 6, h] * table[ids[kv] % 4 + 2, -1 - h]
        return score_mod
    return of


def functions(H, S, device):
    """name -> (what makes the score function of tensors, the tensors, which require gradients). Together they read
    elements by every combination of indices that sums differ by, in all types, by indices that are captured too."""
    g = torch.Generator(device).manual_seed(7)
    new = lambda *shape, dtype=torch.float32: (torch.randn(shape, device=device, generator=g) * 0.3).to(
        dtype).requires_grad_()
    return {"shared": (shared(S), (new(H, S), new(H), new(S), new(2 * S - 1), new())),
            "tables": (tables(torch.arange(S, device=device) * 5 // S),
                       (new(H, S, S, dtype=torch.bfloat16), new(6, H, dtype=torch.float16)))}


def gradients(given, function, seen, dtype=torch.float64):
    """Of the captured tensors of one of ``functions``, dense, computed in dtype; where that is float64 with the tensors
    in float64 too. given: (q, k, v, do, dlse or None)."""
    (q, k, v, do, dlse), (of, learned) = given, function
    if dtype is torch.float64:
        learned = [x.detach().double().requires_grad_() for x in learned]
    return gradients_of(gallery.dense(q, k, v, of(*learned), seen, dtype=dtype), learned, do, dlse)


def gradients_of(results, leaves, do, dlse=None):
    """results: (o, lse). A row that sees nothing has no gradient."""
    o, lse = results
    if dlse is None:
        return torch.autograd.grad(o, leaves, do.to(o.dtype))
    lse = lse.masked_fill(lse == -torch.inf, 0)
    return torch.autograd.grad((o, lse), leaves, (do.to(o.dtype), dlse.to(lse.dtype)))
