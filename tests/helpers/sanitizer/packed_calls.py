"""Packed sequences and pools of states under the sanitizer: a part of `calls.states`."""
import torch

from tests.helpers.sanitizer.calls import grad, on, randn


def packed_states(device):
    """Sequences of 0, 1, 64, 70 tokens and 5 of none, forward and backward; a pool that is written."""
    import tkq

    q, k, v, g, beta, initial, do, dstate = on(
        device, *(randn(i, 1, 140, 2, 64) / 8 for i in (0, 1)), randn(2, 1, 140, 4, 64),
        -randn(3, 1, 140, 4, dtype=torch.float32).abs(), randn(4, 1, 140, 4, dtype=torch.float32).sigmoid(),
        randn(5, 4, 4, 64, 64, dtype=torch.float32), randn(6, 1, 140, 4, 64), randn(7, 4, 4, 64, 64).float())
    cu, rows = on(device, torch.tensor([0, 0, 1, 65, 135]), torch.tensor([1, -1, 3, 0], dtype=torch.int32))
    for op, tensors in ((tkq.linear_attn, (q, k, v, g)), (tkq.gated_delta_rule, (q, k, v, g, beta))):
        given = [x.detach().requires_grad_() for x in (*tensors, initial)]
        o, state = op(*given[:-1], initial_state=given[-1], output_final_state=True, cu_seqlens=cu)
        yield f"{op.__name__}, packed", (o, state, *grad((o, state), given, (do, dstate)))
        pool = initial.clone()
        o = op(*tensors, initial_state=pool, cu_seqlens=cu, state_indices=rows)
        yield f"{op.__name__}, with a pool", (o, pool)
    columns = (g[..., None] * torch.linspace(0, 2, 64, device=device)).contiguous()
    given = [x.detach().requires_grad_() for x in (q, k, v, columns, beta, initial)]
    o, state = tkq.gated_delta_rule(*given[:5], None, given[5], True, cu_seqlens=cu.int())
    yield "gated_delta_rule, packed, columns", (o, state, *grad((o, state), given, (do, dstate)))
    given = [x.detach().requires_grad_() for x in (v, beta, -beta[0, 0], k, q, beta[0, 1], do, beta[0, 2], initial)]
    y, state = tkq.mamba2_ssd(*given, True, return_final_states=True, cu_seqlens=cu.int())
    yield "mamba2_ssd, packed", (y, state, *grad((y, state), given, (do, dstate)))
