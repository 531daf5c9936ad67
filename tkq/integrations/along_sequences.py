"""What `dtensor` says of convolutions and scans: sequences, channels or heads are spread over a mesh."""
from torch.distributed.tensor import Partial, Replicate, Shard

S, R, P = Shard, Replicate(), Partial()


def channels(g):
    """Sequences, or channels, where no heads of theirs are normed."""
    for at, of_weight in ((0, R),) * (g.cu_seqlens is None) + ((2, S(0)),) * (not g.norm_heads):
        state = 0 if at == 0 else 1
        yield ((S(at), S(state) if g.output_final_state else R),
               dict(x=S(at), weight=of_weight, bias=of_weight, initial_state=S(state)))


def channels_backward(g):
    for at, sums, weight, state in ((0, P, R, S(0)),) * (g.cu_seqlens is None) + ((2, S(0), S(0), S(1)),) * (
            not g.norm_heads):
        yield ((S(at) if g.need_x else R, sums if g.need_weights else R,
                sums if g.need_weights and g.bias is not None else R, state if g.need_state else R),
               dict(dy=S(at), x=S(at), weight=weight, bias=weight, initial_state=state, dfinal=state))


def scan(g):
    """Sequences, or channels."""
    for at, state in ((0, 0), (2, 1)):
        yield ((S(at), S(state) if g.output_final_state else R), dict(a=S(at), b=S(at), initial_state=S(state)))


def scan_backward(g):
    for at, state in ((0, 0), (2, 1)):
        yield (tuple(S(i) if need else R for i, need in ((at, g.need_a), (at, g.need_b), (state, g.need_state))),
               dict(dh=S(at), a=S(at), h=S(at), initial_state=S(state), dfinal=S(state)))


def heads_of_tokens(g):
    """Sequences, or heads."""
    yield (S(0),), dict(u=S(0), pre_gate=S(0), post_gate=S(0))
    yield (S(1),), dict(u=S(1), k=S(0), d=S(0), pre_gate=S(1), post_gate=S(1))


def heads_of_tokens_backward(g):
    for at, of_filter, sums in ((0, R, P), (1, S(0), S(0))):
        yield ((S(at) if g.need_u else R, sums if g.need_k else R, sums if g.need_d else R,
                S(at) if g.need_pre else R, S(at) if g.need_post else R),
               dict(dy=S(at), u=S(at), k=of_filter, d=of_filter, pre_gate=S(at), post_gate=S(at)))
