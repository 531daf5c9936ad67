"""What ops of states give to kernels, where no GPU is needed: tensors as they are read, room for what is written, and
results and gradients as they are promised."""
import math

import pytest
import torch

import tkq
from tests.helpers.emulation import fake_gpu
from tkq.linear_attention import ops as linear_ops
from tkq.linear_attention.channels.bounded import launch as bounded
from tkq.linear_attention.delta import ops as delta_ops
from tkq.linear_attention.launch import Given, launch
from tkq.linear_attention.split import concurrent
from tkq.linear_attention.split.plan import Split
from tkq.linear_attention.ssd import ops as ssd_ops
from tkq.linear_attention.suffix.launch import suffix_sums

BF16, F32 = torch.bfloat16, torch.float32


def zeros(*shape, dtype=BF16):
    return torch.zeros(shape, dtype=dtype)


X, Q, G = zeros(2, 128, 2, 64), zeros(2, 128, 2, 16), zeros(2, 128, 2, dtype=F32)
COLUMNS, STATE, MAP = zeros(2, 128, 2, 64, dtype=F32), zeros(2, 2, 64, 64, dtype=F32), zeros(2, 64, 64)
CALLS = {  # op, its tensors by name
    "linear_attn": (tkq.linear_attn, dict(q=X, k=X, v=X, g=G, initial_state=STATE)),
    "linear_attn, columns": (tkq.linear_attn, dict(q=X, k=X, v=X, g=COLUMNS, initial_state=STATE)),
    "gated_delta_rule": (tkq.gated_delta_rule, dict(q=X, k=X, v=X, g=G, beta=G, initial_state=STATE)),
    "gated_delta_rule, columns": (tkq.gated_delta_rule, dict(q=X, k=X, v=X, g=COLUMNS, beta=G, initial_state=STATE)),
    "mamba2_ssd": (tkq.mamba2_ssd, dict(x=X, dt=G, A=G[0, 0], B=X, C=X, D=G[0, 0], dt_bias=G[0, 0],
                                        initial_states=STATE)),
    "mamba2_ssd, gated": (tkq.mamba2_ssd, dict(x=X, dt=G, A=G[0, 0], B=X, C=X, D=X[0, 0], z=X)),
    "hedgehog": (tkq.hedgehog, dict(q=X, k=X, v=X, q_map=MAP, k_map=MAP, linear_factor=G[0, 0],
                                    window_factor=G[0, 0])),
    "based": (tkq.based, dict(q=Q, k=Q, v=X))}


@pytest.fixture
def gpu():
    with fake_gpu.launches() as seen:
        yield seen


@pytest.fixture
def filled():
    """What is not written is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def tensors_of(seen):
    """All that kernels were given."""
    def walk(x):
        if isinstance(x, torch.Tensor):
            yield x
        elif isinstance(x, tuple):
            for y in x:
                yield from walk(y)

    return [x for _, arguments in seen for x in walk(arguments)]


@pytest.mark.parametrize("name, wanted", [(name, wanted) for name in CALLS for wanted in CALLS[name][1]])
def test_each_gradient_alone(gpu, name, wanted):
    """Of a sum, whose own gradient no kernel reads as it lies."""
    op, given = CALLS[name]
    leaf = given[wanted].detach().requires_grad_()
    found, = torch.autograd.grad(op(**given | {wanted: leaf}).sum(), leaf)
    assert (found.shape, found.dtype) == (leaf.shape, leaf.dtype)
    for x in tensors_of(gpu):
        if x.dtype == BF16 and x.dim() == 4:
            assert all(stride or size == 1 for stride, size in zip(x.stride(), x.shape))


def test_gradients_are_as_the_meta_device_says(gpu):
    """Of states and betas in bfloat16."""
    narrow, beta = STATE.to(BF16), G.to(BF16)
    for ops, given, more, count in (
            (linear_ops, (X, STATE, X, X, X, G, narrow), (None,), 5),
            (linear_ops, (X, STATE, X, X, X, COLUMNS, narrow), (None,), 5),
            (delta_ops, (X, STATE, X, X, X, G, beta, narrow), (None,), 6),
            (delta_ops, (X, STATE, X, X, X, COLUMNS, beta, narrow), (None,), 6),
            (ssd_ops, (X, STATE, X, G.to(BF16), G[0, 0], X, X, X[0, 0], X, beta[0, 0], narrow), (True, 0.0, 1.0), 9)):
        found, said = (call(*given, *more, *(True,) * count, None) for call in (ops._backward_cuda, ops._backward_fake))
        assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in said]


def engine(seen):
    """(spec, operands) of launches of the engine."""
    return [(recipe.args[0], arguments) for recipe, arguments in seen if recipe.builder.endswith("LinearAttention")]


def test_gates_of_heads_are_contiguous(gpu):
    g = torch.zeros(4)[::2].requires_grad_()
    o = tkq.linear_attn(X, X, X, g)
    torch.autograd.grad(o, g, torch.zeros_like(o))
    with torch.no_grad():
        tkq.linear_attn(X, X, X, g, checkpoint_every=64)
    found = [arguments[1][3] for _, arguments in engine(gpu)]
    assert len(found) == 4 and all(x.is_contiguous() for x in found)


@pytest.mark.parametrize("F", [32, 64])
def test_hedgehogs_factors_are_contiguous(gpu, F):
    factors, maps = torch.zeros(4)[::2], zeros(2, 64, F).requires_grad_()
    o = tkq.hedgehog(X, X, X, maps, maps, factors, factors)
    torch.autograd.grad(o, maps, torch.zeros_like(o))
    found = [x for x in tensors_of(gpu) if x.shape == (2,)]
    assert len(found) >= 4 and all(x.is_contiguous() for x in found)


ODD, ODD_COLUMNS = zeros(2, 128, 2, 65)[..., 1:], zeros(2, 128, 2, 65, dtype=F32)[..., 1:]
MISPLACED = {
    "linear_attn: g": lambda: tkq.linear_attn(X, X, X, ODD_COLUMNS),
    "linear_attn: q": lambda: tkq.linear_attn(ODD, X, X, checkpoint_every=64),
    "gated_delta_rule: g": lambda: tkq.gated_delta_rule(X, X, X, ODD_COLUMNS, G),
    "gated_delta_rule: v": lambda: tkq.gated_delta_rule(X, X, ODD, G, G, checkpoint_every=64),
    "mamba2_ssd: z": lambda: tkq.mamba2_ssd(X, G, G[0, 0], X, X, z=ODD),
    "mamba2_ssd: C": lambda: tkq.mamba2_ssd(X, G, G[0, 0], X, ODD, checkpoint_every=64),
    "hedgehog: k_map": lambda: tkq.hedgehog(X, X, X, MAP, zeros(2, 64, 65)[..., 1:], G[0, 0], G[0, 0]),
    "based: k": lambda: tkq.based(Q, zeros(2, 128, 2, 17)[..., 1:], X),
    "ssd_step: z": lambda: tkq.ssd_step(STATE, X[:, 0], G[:, 0], G[0, 0], X[:, 0], X[:, 0], z=ODD[:, 0]),
    "linear_attn_step: out": lambda: tkq.linear_attn_step(X, X, X, None, STATE, out=ODD)}


@pytest.mark.parametrize("name", MISPLACED)
def test_what_tma_cannot_read_is_refused(gpu, name):
    with pytest.raises(ValueError, match=f"^{name}: strides are"):
        MISPLACED[name]()
    assert not gpu


MANY = zeros(1, 1, 1, 64).expand(1, 1, 65536, 64)
HEADS = zeros(1, 1, 1, dtype=F32).expand(1, 1, 65536)


@pytest.mark.parametrize("name, call", [
    ("linear_attn: v", lambda: tkq.linear_attn(X[:1, :1, :1], X[:1, :1, :1], MANY)),
    ("mamba2_ssd: x", lambda: tkq.mamba2_ssd(MANY, HEADS, HEADS[0, 0], X[:1, :1, :1], X[:1, :1, :1])),
    ("hedgehog: q", lambda: tkq.hedgehog(MANY, MANY, MANY, *(MANY[0, 0, :, :, None].expand(-1, -1, 64),) * 2,
                                         HEADS[0, 0], HEADS[0, 0])),
    ("based: v", lambda: tkq.based(Q[:1, :1, :1], Q[:1, :1, :1], MANY))])
def test_too_many_heads(name, call):
    with pytest.raises(NotImplementedError, match=f"{name}: has 65536 heads, supported are up to 65535"):
        call()


STATES = {
    "linear_attn": lambda v, s, **more: tkq.linear_attn(X, X, v, G, initial_state=s, output_final_state=True, **more),
    "linear_attn, columns": lambda v, s, **more: tkq.linear_attn(
        X, X, v, COLUMNS, initial_state=s, output_final_state=True, **more),
    "gated_delta_rule": lambda v, s, **more: tkq.gated_delta_rule(
        X, X, v, G, G, initial_state=s, output_final_state=True, **more)}


@pytest.mark.parametrize("more", [{}, dict(checkpoint_every=64)])
@pytest.mark.parametrize("v_first", [False, True, None])
def test_results_lie_as_on_a_cpu(v_first, more):
    """v_first None: Mamba-2's."""
    v, state = zeros(2, 128, 2, 96), zeros(2, 2, 96, 64, dtype=F32)
    calls = [lambda: tkq.mamba2_ssd(v, G, G[0, 0], X, X, initial_states=state, return_final_states=True, **more)]
    if v_first is not None:
        calls = [lambda call=call: call(v, state if v_first else state.mT.contiguous(), state_v_first=v_first, **more)
                 for name, call in STATES.items() if not (more and "columns" in name)]
    for call in calls:
        wanted = [(x.shape, x.stride(), x.dtype) for x in call()]
        with fake_gpu.launches():
            assert [(x.shape, x.stride(), x.dtype) for x in call()] == wanted


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_a_pools_own_type_is_written(gpu, dtype):
    pool, rows = STATE.to(dtype), torch.arange(2)
    tkq.linear_attn(X, X, X, G, initial_state=pool, state_indices=rows)
    tkq.gated_delta_rule(X, X, X, G, G, initial_state=pool, state_indices=rows)
    tkq.mamba2_ssd(X, G, G[0, 0], X, X, initial_states=pool, state_indices=rows)
    assert len(gpu) == 3 and {(r.args[0].initial, r.args[0].final) for r, _ in gpu} == {
        ("fp32", "fp32") if dtype == F32 else ("bf16", "bf16")}
    assert all(any(x is pool or x.data_ptr() == pool.data_ptr() for x in tensors_of([one])) for one in gpu)


# ---- what no kernel writes ------------------------------------------------------------------------------------------


def test_without_sequences_all_is_zero(gpu, filled):
    none, one = torch.tensor([64]), X[:1]
    made = launch(Given(one, one, one, G[:1], G[:1], updates=True, cu=none), 1.0)
    assert not gpu and not made.o.any() and not made.dv.any()
    assert suffix_sums(G[:1], end=torch.zeros(0, 2), cu=none).shape == (1, 128, 2)
    (recipe, (_, (_, end, *_))), = gpu
    assert end is None and not recipe.args[0].end


def test_tokens_of_no_sequence_have_sums_of_0(gpu, filled):
    """Of the delta rule, whose are beta's gradient."""
    one, cu = X[:1], torch.tensor([3, 100])
    made = launch(Given(one, one, one, G[:1], G[:1], x=one, reverse=True, cu=cu, inverse=one), 1.0)
    assert not made.dots.any()


def test_rows_of_no_checkpoint_are_0(gpu, filled):
    _, found = tkq.linear_attn(X[:1], X[:1], X[:1], cu_seqlens=torch.tensor([0, 40, 128]), checkpoint_every=64)
    assert found.shape[0] == 2 and not found.any()


def test_without_a_checkpoint_none_are_made(gpu):
    tkq.linear_attn(X, X, X, checkpoint_every=192)
    (spec, (_, operands, *_)), = engine(gpu)
    assert spec.checkpoints is None and operands[12:14] == (None, None)


@pytest.mark.parametrize("has_state", [False, True])
def test_without_tokens(gpu, filled, has_state):
    x, g = X[:, :0], G[:, :0]
    state = torch.randn(2, 2, 64, 64) if has_state else None
    D = torch.zeros(2, requires_grad=True)
    for call in (lambda: tkq.linear_attn(x, x, x, g, initial_state=state, output_final_state=True),
                 lambda: tkq.gated_delta_rule(x, x, x, g, g, initial_state=state, output_final_state=True),
                 lambda: tkq.mamba2_ssd(x, g, g.new_zeros(2), x, x, D, initial_states=state, return_final_states=True)):
        o, final = call()
        assert o.shape == x.shape and torch.equal(final, state if has_state else torch.zeros(2, 2, 64, 64))
    of_D, = torch.autograd.grad(o, D, torch.zeros_like(o))
    q = Q[:, :0].requires_grad_()
    torch.autograd.grad(tkq.based(q, q, x).sum(), q)
    maps = zeros(2, 64, 64).requires_grad_()
    torch.autograd.grad(tkq.hedgehog(x, x, x, maps, maps, D.detach(), D.detach()).sum(), maps)
    assert not gpu and not of_D.any()


# ---- room -----------------------------------------------------------------------------------------------------------


def test_each_segment_has_room_for_the_skip_connections_gradient(gpu):
    x, g, D = zeros(1, 16384, 2, 64), zeros(1, 16384, 2, dtype=F32), torch.zeros(2, requires_grad=True)
    y = tkq.mamba2_ssd(x, g, g[0, 0], x, x, D)
    torch.autograd.grad(y, D, torch.zeros_like(y))
    of_skip = [(spec, arguments[1][5], arguments[3][6]) for spec, arguments in engine(gpu)
               if arguments[3][6] is not None]
    assert [spec.part for spec, *_ in of_skip] == ["outputs"]
    assert all(len(found) == len(starts) > 1 for _, starts, found in of_skip)


@pytest.mark.parametrize("sequences", [1, 2, 5])
def test_each_sequence_has_room_for_its_sums(gpu, sequences):
    """Beside them the tokens before the first and behind the last have a row each."""
    cu = torch.linspace(0, 128, sequences + 1).int()
    dt = G[:1].detach().requires_grad_()
    y = tkq.mamba2_ssd(X[:1], dt, G[0, 0], X[:1], X[:1], cu_seqlens=cu)
    torch.autograd.grad(y, dt, torch.zeros_like(y))
    suffix_sums(G[:1], cu=cu)
    sums = [arguments[1] for recipe, arguments in gpu if recipe.builder.endswith("SuffixSums")]
    assert len(sums) == 2
    for _, _, totals, _, _, of_steps in sums:
        assert totals.shape[0] == sequences + 2 and totals.dtype == torch.float64
        assert of_steps is None or of_steps[-1].shape == (2, *totals.shape)


@pytest.mark.parametrize("tokens", [9 * 64, 1000, 64 * 63, 8192, 64 * 250])
def test_based_has_no_segment_without_a_chunk(gpu, tokens):
    x = zeros(1, tokens, 2, 64)
    tkq.based(x[..., :16], x[..., :16], x)
    count, each = gpu[-1][1][-2:]
    assert (count - 1) * each < math.ceil(tokens / 64) <= count * each


@pytest.mark.parametrize("V, dtype", [(64, BF16), (128, F32)])
def test_gradients_of_parts_of_v_are_added_up_in_float32(gpu, V, dtype):
    leaves = [x.detach().requires_grad_() for x in (Q, Q, zeros(2, 128, 2, V))]
    torch.autograd.grad(tkq.based(*leaves).sum(), leaves)
    found = [arguments[1][-1] for recipe, arguments in gpu if recipe.builder.endswith("BasedGradient")]
    assert [(x.shape[0], x.dtype) for x in found] == [(V // 64, dtype)] * 2


# ---- which launches -------------------------------------------------------------------------------------------------


def test_kernels_are_those_of_their_operands(gpu):
    """Where a wide V is gone through by halves, whose launches differ."""
    leaves = [x.detach().requires_grad_() for x in (X, X, zeros(2, 128, 2, 256), G, G)]
    o = tkq.gated_delta_rule(*leaves)
    torch.autograd.grad(o, leaves, torch.zeros_like(o))
    there = [(spec, [x is not None for x in arguments[1]]) for spec, arguments in engine(gpu)]
    assert [(spec.dot, spec.less) for spec, _ in there] == [(has[8], has[19]) for _, has in there]
    assert {spec.less for spec, _ in there if spec.second == "pair"} == {False, True}


def of_columns(dtype=BF16, V=128, **changed):
    """A call with gates of columns that begin with `A_log` and a lower bound."""
    q, v = torch.zeros(1, 64, 2, 128, dtype=dtype), torch.zeros(1, 64, 2, V, dtype=dtype)
    return dict(q=q, k=q, v=v, g=q, beta=G[:1, :64], A_log=torch.zeros(2), use_gate_in_kernel=True,
                use_qk_l2norm_in_kernel=True, gate_lower_bound=-5.0) | changed


@pytest.mark.parametrize("given, kernels", [
    (of_columns(), {"BoundedAttention"}), (of_columns(V=80), {"BoundedAttention"}),
    (of_columns(V=64), {"ColumnDecays", "ChannelAttention"}),
    (of_columns(torch.float16), {"ColumnDecays", "ChannelAttention", "PlainNorm"}),
    (of_columns(q=zeros(1, 64, 2, 129)[..., 1:]), {"ColumnDecays", "ChannelAttention", "PlainNorm"})])
def test_kernels_of_lengths_and_gates(gpu, given, kernels):
    tkq.gated_delta_rule(**given)
    assert {recipe.builder.partition(":")[2] for recipe, _ in gpu} == kernels


def test_bounds():
    q = zeros(1, 64, 2, 128)
    assert all(bounded.supported(q, q, q, bound) for bound in (-5.0, -1))
    assert not any(bounded.supported(q, q, q, bound) for bound in (0.0, 0, 1.0, True, None, -1e9))


def test_other_types_are_refused_where_the_kernel_makes_gates(gpu):
    with pytest.raises(TypeError, match="gated_delta_rule: A_log"):
        tkq.gated_delta_rule(**of_columns(A_log=torch.zeros(2, dtype=torch.float64)))
    with pytest.raises(ValueError, match="gated_delta_rule: v: strides"):
        tkq.gated_delta_rule(**of_columns(v=zeros(1, 64, 2, 129)[..., 1:]))


@pytest.mark.parametrize("more", [dict(checkpoint_every=64),
                                  dict(initial_state=zeros(1, 2, 128, 128), state_indices=torch.zeros(1).int())])
def test_checkpoints_and_pools_are_left_whole(gpu, more):
    """Of few long sequences."""
    x, g = zeros(1, 16384, 2, 128), zeros(1, 16384, 2, dtype=F32)
    tkq.linear_attn(x, x, x, g, **more)
    tkq.gated_delta_rule(x, x, x, g, g, **more)
    assert len(gpu) == 2 and all(recipe.args[0].part is None and not recipe.args[0].reach for recipe, _ in gpu)


class Stream:
    cuda_stream = 0

    def __init__(self, log):
        self.log = log

    def wait_stream(self, other):
        self.log.append((self, other))

    def __enter__(self):
        self.log.append(self)

    def __exit__(self, *error):
        pass


def test_streams_wait_for_each_other(gpu, monkeypatch):
    log = []
    current = Stream(log)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(concurrent, "_beside", lambda device, current, count: [Stream(log) for _ in range(count)])
    calls = [(Given(X, X, X), 1.0)] * 3
    assert len(concurrent._on_streams(calls, [Split(1, 1)] * 3)) == 3 == len(gpu)
    (one, _), (two, _) = log[:2]
    assert log == [(one, current), (two, current), current, one, two, (current, one), (current, two)]
    assert len({current, one, two}) == 3


def test_streams_beside_a_stream_are_its_own(monkeypatch):
    monkeypatch.setattr(concurrent, "_streams", {})
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())
    one, other = Stream([]), Stream([])
    other.cuda_stream = 1
    found = concurrent._beside("cuda:0", one, 2)
    assert concurrent._beside("cuda:0", one, 1) == found[:1]
    assert not set(found) & set(concurrent._beside("cuda:0", other, 2) + concurrent._beside("cuda:1", one, 2))


@pytest.mark.parametrize("changed", [dict(cu=torch.tensor([0, 2048])), dict(starts=STATE[:1]),
                                     dict(v=zeros(1, 512, 2, 64)), None])
def test_what_is_launched_concurrently(gpu, changed):
    """Whole sequences of one length, which are not short."""
    x = zeros(1, 2048, 160, 64)
    given = Given(x, x, x)
    found = concurrent._worth([given, given if changed is None else given._replace(**changed)])
    assert (found is not None) == (changed is None)
