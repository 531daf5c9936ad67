"""Tensors of packed sequences, and calls with pools of states, for `every_op`."""
import torch

BF16, F32 = torch.bfloat16, torch.float32


def packed_heads(t):
    return dict(q=t(1, t.rows, 2, 64), k=t(1, t.rows, 2, 64), v=t(1, t.rows, 4, 64),
                g=-t(1, t.rows, 4, dtype=F32).abs(), initial_state=t(3, 4, 64, 64, dtype=F32), cu_seqlens=t.starts(3))


def packed_unit_keys(t):
    given = packed_heads(t)
    k = torch.nn.functional.normalize(given["k"].float(), dim=-1).to(t.dtype)
    return dict(given, k=k, beta=t(1, t.rows, 4, dtype=F32).sigmoid())


def packed_heads_and_indices(t):
    q, k, v, g, pool, cu_seqlens = packed_heads(t).values()
    return dict(q=q, k=k, v=v, g=g, pool=pool, cu_seqlens=cu_seqlens, state_indices=t.rows_apart(-1, 3))


def packed_unit_keys_and_indices(t):
    q, k, v, g, pool, cu_seqlens, beta = packed_unit_keys(t).values()
    return dict(q=q, k=k, v=v, g=g, beta=beta, pool=pool, cu_seqlens=cu_seqlens, state_indices=t.rows_apart(-1, 3))


def packed_columns(t):
    """Gates for each column of k."""
    given = packed_heads(t)
    return dict(given, g=-t(1, t.rows, 4, 64, dtype=F32).abs())


def packed_columns_and_unit_keys(t):
    given = packed_unit_keys(t)
    return dict(given, g=-t(1, t.rows, 4, 64, dtype=F32).abs())


def packed_ssd(t):
    return dict(x=t(1, t.rows, 4, 64), dt=t(1, t.rows, 4, dtype=BF16), A=-t(4, dtype=F32).exp(),
                B=t(1, t.rows, 2, 64) / 8, C=t(1, t.rows, 2, 64) / 8, D=t(4, dtype=F32),
                initial_states=t(3, 4, 64, 64, dtype=F32), cu_seqlens=t.starts(3))


def packed_ssd_and_indices(t):
    return dict(packed_ssd(t), state_indices=t.rows_apart(-1, 3))


def channels(t):
    return dict(x=t(2, t.rows, 64), weight=t(64, 4), bias=t(64))


def factors(t):
    return dict(a=t(2, t.rows, 64).sigmoid(), b=t(2, t.rows, 64), initial_state=t(2, 64, dtype=F32))


def factors_along_time(t):
    return dict(a=t(2, 64, t.rows).sigmoid(), b=t(2, 64, t.rows))


def sequences_and_filters(t):
    """Of a long convolution: its filters are float32, whatever else is."""
    return dict(u=t(2, 8, t.rows), k=t(8, t.rows, dtype=torch.float32) / 8, d=t(8, dtype=torch.float32))


def channels_along_time(t):
    return dict(x=t(2, 64, t.rows), weight=t(64, 4), bias=t(64))


def channels_and_numbers(t):
    return dict(channels(t), seq_idx=(t(2, t.rows).abs() > 1).int())


def packed_channels(t):
    return dict(x=t(1, t.rows, 64), weight=t(64, 4), bias=t(64), initial_state=t(3, 64, 3), cu_seqlens=t.starts(3))


def with_pool(function, *tensors, pool, **places):
    """The pool, which is written, is a copy: a call may come again."""
    return function(*tensors, initial_state=pool.clone(), output_final_state=True, **places)
