"""gemm's epilogues without a GPU: what they mean, what is refused, out."""
import collections
import contextlib
import functools
import inspect

import pytest
import torch
import torch.nn.functional as F

import tkq
from tests.helpers.emulation import fake_gpu
from tkq.gemm.dense import launch as call
from tkq.gemm.dense import ops, realign_plan
from tkq.gemm.dense.config import Config, can_hold_in_registers
from tkq.gemm.dense.plan import configure_epilogue, fit_to_spec, plan, planned_kernel
from tkq.gemm.dense.spec import GemmSpec
from tkq.gemm.epilogue.spec import ACTIVATIONS, GATED, Epilogue, is_located, name_of, sources
from tkq.runtime.call import check

BF16 = torch.bfloat16


def operands(m=5, n=8, k=16, batch=(), dtype=BF16):
    return torch.randn(*batch, m, k).to(dtype), torch.randn(*batch, k, n).to(dtype)


def double(x):  # a function of one's own, as the kernels would take it
    return x + x


def masked(x, row, column):
    return x * (column <= row)


MEANINGS = {
    "relu": F.relu, "silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "swiglu": lambda x: F.silu(x[..., :4]) * x[..., 4:], "geglu": lambda x: F.gelu(x[..., :4]) * x[..., 4:],
    "geglu_tanh": lambda x: F.gelu(x[..., :4], approximate="tanh") * x[..., 4:],
    "swiglu_interleaved": lambda x: F.silu(x[..., ::2]) * x[..., 1::2],
    "geglu_interleaved": lambda x: F.gelu(x[..., ::2]) * x[..., 1::2],
    "geglu_tanh_interleaved": lambda x: F.gelu(x[..., ::2], approximate="tanh") * x[..., 1::2],
}


def test_every_activation_has_a_meaning_here():
    assert set(MEANINGS) == {*ACTIVATIONS, *GATED}


@pytest.mark.parametrize("activation", MEANINGS)
@pytest.mark.parametrize("batch", ((), (3,)))
def test_meaning(activation, batch):
    a, b = operands(batch=batch)
    bias = torch.randn(8)
    want = MEANINGS[activation](0.5 * (a.double() @ b.double()) + bias.double())
    got = tkq.gemm(a, b, bias=bias, activation=activation, alpha=0.5, out_dtype=torch.float32)
    assert got.shape == want.shape and torch.allclose(got.double(), want, rtol=1e-5, atol=1e-5)


def test_c_is_added_before_the_activation():
    a, b = operands()
    c = torch.randn(5, 8).to(BF16)
    want = F.relu(2 * (a.double() @ b.double()) - 3 * c.double())
    assert torch.equal(tkq.gemm(a, b, c=c, alpha=2, beta=-3, activation="relu"), want.to(BF16))


@pytest.mark.parametrize("first", (0, 1))
def test_a_matrix_for_a_whole_batch(first):
    a, b = operands(batch=(3,))
    shared = [a, b]
    shared[first] = shared[first][:1].expand(3, -1, -1)
    assert torch.equal(tkq.gemm(*shared), torch.stack([tkq.gemm(x, y) for x, y in zip(*shared)]))


# ---- out -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (BF16, torch.float32))
def test_out(dtype):
    a, b = operands()
    buffer = torch.full((7, 12), -7.0, dtype=dtype)
    out = buffer[1:-1, 2:10]
    assert tkq.gemm(a, b, out=out) is out and torch.equal(out, tkq.gemm(a, b, out_dtype=dtype))
    assert (buffer[0] == -7).all() and (buffer[-1] == -7).all() and (buffer[:, :2] == -7).all()


def test_out_may_be_c():
    a, b = operands()
    c = torch.randn(5, 8).to(BF16)
    want = tkq.gemm(a, b, c=c, beta=1.0)
    tkq.gemm(a, b, c=c, beta=1.0, out=c)
    assert torch.equal(c, want)


def test_out_beside_an_operand_in_one_matrix():
    both = torch.randn(5, 24).to(BF16)
    a, out, b = both[:, :16], both[:, 16:], operands()[1]
    want = tkq.gemm(a, b)
    assert torch.equal(tkq.gemm(a, b, out=out), want)


def test_out_under_compile():
    a, b = operands()
    f = torch.compile(lambda a, b, out: tkq.gemm(a, b, out=out) + 1, fullgraph=True, backend="eager")
    for rows in (5, 4, 3):  # sizes that change are symbols from the second on
        x, out = a[:rows].clone(), torch.empty(rows, 8, dtype=BF16)
        assert torch.equal(f(x, b, out), tkq.gemm(x, b) + 1) and torch.equal(out, tkq.gemm(x, b))


@pytest.mark.parametrize("shape, strides, meets", (
    ((5, 8), (8, 1), False), ((5, 8), (7, 1), True), ((5, 8), (0, 1), True), ((1, 8), (3, 1), False),
    ((3, 5, 8), (40, 8, 1), False), ((3, 5, 8), (39, 8, 1), True), ((3, 5, 8), (8, 24, 1), False),
    ((3, 5, 8), (8, 23, 1), True), ((3, 5, 8), (0, 8, 1), True), ((1, 5, 8), (0, 8, 1), False),
    ((3, 1, 8), (8, 1, 1), False), ((3, 1, 8), (7, 99, 1), True), ((3, 5, 8), (100, 7, 1), True)))
def test_what_meets_itself(shape, strides, meets):
    assert check.meets_itself(shape, strides) is meets
    places = torch.arange(500).as_strided(shape, strides)
    assert (places.unique().numel() < places.numel()) is meets


def test_out_of_a_batch_that_lies_apart():
    a, b = operands(batch=(3,))
    out = torch.full((5, 3, 8), -7.0, dtype=BF16).transpose(0, 1)
    assert tkq.gemm(a, b, out=out) is out and torch.equal(out, tkq.gemm(a, b))


def test_the_short_way_to_out():
    """What has been launched is launched again, wherever a call's tensors lie, unless out may lie on an input."""
    a, b = operands()
    out, c = torch.zeros(2, 5, 8, dtype=BF16)
    calls = []

    def written(out, a=a, b=b, out_dtype=None, **extra):
        """Was a call replayed? Where it was not, what it looks like is remembered, as gemm does."""
        extra, before = call.Extra(**extra), len(calls)
        key = call.quick_into(out, a, b, out_dtype, extra)
        assert (key is None) == (len(calls) > before)
        if key is not None:
            call.remember_into(key, (lambda *args: calls.append(args), 6), out, a, b, extra)
        return key is None

    call.clear()
    other = torch.zeros(5, 8, dtype=BF16), a.clone(), b.clone()
    assert [written(out), written(out), written(*other)] == [False, True, True]
    assert calls[0][2] is out and calls[0][-1] == 6
    assert [written(out, alpha=2.0), written(out, alpha=3.0), written(out, out_dtype=BF16)] == [False, True, False]
    assert [written(torch.zeros(7, 8, dtype=BF16)[1:6]) for _ in range(2)] == [True, True], "apart, of the same strides"
    both = torch.zeros(200, dtype=BF16)
    near, far = both[:80].view(5, 16), both[80:120].view(5, 8)
    assert written(far, near) and not written(both[72:112].view(5, 8), near), "out begins in a"
    columns = both[80:].view(5, 24)
    assert not any(written(columns[:, 16:], columns[:, :16]) for _ in range(2)), "columns of one matrix: seen anew"
    row = dict(bias=torch.zeros(8, dtype=BF16))
    assert not written(out, **row) and written(out, **row) and not written(out, bias=out[4]), "bias in out"
    assert [written(out, c=x, beta=1.0) for x in (c, c, out)] == [False, True, True], "c itself"
    long = torch.zeros(6, 8, dtype=BF16)
    assert not written(long[1:], c=long[:-1], beta=1.0), "c a row further"
    call.remember_into("views", None, out, a, b, call.PLAIN)
    assert "views" not in call._launch_cache_into
    call.clear()
    assert not written(out)
    call.clear()


@pytest.mark.parametrize("alpha, beta", [(1e39, 0.5), (2.0, -1e39), (float("nan"), 0.5),
                                         pytest.param(10**400, 0.5, id="1e400")])
def test_numbers_that_no_launch_may_have(alpha, beta):
    """Where the kernel of such a call is known: it does not look at numbers."""
    refused = functools.partial(pytest.raises, ValueError, match="(alpha|beta): got")
    a, b = operands()
    c, out, launched = torch.zeros(5, 8).to(BF16), torch.zeros(5, 8).to(BF16), []
    call.clear()
    _, key = call.quick(a, b, None, "", c, 2.0, 0.5, None)
    call._launch_cache.add(key, (lambda *given: launched.append(given[5:7]), 1, (5, 8), (8, 1), BF16))
    key = call.quick_into(out, a, b, None, call.Extra(c=c, alpha=2.0, beta=0.5))
    call._launch_cache_into.add(key, (lambda *given: launched.append(given[5:7]), 1, 0, 0, 0, 0, 80))
    try:
        for x, y, expected in ((3.0, 0.25, contextlib.nullcontext), (alpha, beta, refused)):
            with expected():
                ops._launch(a, b, None, "", c, x, y, None, False)
            with expected():
                ops._launch_into(out, a, b, None, call.Extra(c=c, alpha=x, beta=y), "direct")
        assert launched == [(3.0, 0.25)] * 2
    finally:
        call.clear()


BAD = (
    (lambda a, b: dict(bias=torch.zeros(7)), ValueError, ("bias", "(7,)", "(8)")),
    (lambda a, b: dict(bias=torch.zeros(8, dtype=torch.int32)), TypeError, ("bias", "int32")),
    (lambda a, b: dict(bias=torch.zeros(16)[::2]), ValueError, ("bias", "contiguous")),
    (lambda a, b: dict(bias=torch.zeros(8, device="meta")), ValueError, ("bias", "meta")),
    (lambda a, b: dict(activation="tanh"), ValueError, ("activation", "'tanh'", "silu")),
    (lambda a, b: dict(activation=3), TypeError, ("activation", "int")),
    (lambda a, b: dict(activation=lambda x: x), ValueError, ("activation", "lambda")),
    (lambda a, b: dict(activation="tkq.gemm.dense.plan:nothing"), ValueError, ("activation", "nothing")),
    (lambda a, b: dict(activation=F.silu), ValueError, ("activation", "torch.nn.functional:silu", "tensors", "'silu'")),
    (lambda a, b: dict(activation="torch.nn.functional:relu"), ValueError, ("activation", "tensors", "'relu'")),
    (lambda a, b: dict(activation=torch.tanh), TypeError, ("activation", "builtin_function", "silu")),
    (lambda a, b: dict(activation=double), NotImplementedError, ("double", "CUDA")),
    (lambda a, b: dict(c=torch.zeros(5, 8).to(BF16)), ValueError, ("c is given", "beta is 0.0")),
    (lambda a, b: dict(beta=1.0), ValueError, ("c is not given", "beta is 1.0")),
    (lambda a, b: dict(c=torch.zeros(5, 7).to(BF16), beta=1.0), ValueError, ("c", "(5, 7)", "(5, 8)")),
    (lambda a, b: dict(c=torch.zeros(5, 8), beta=1.0), TypeError, ("c", "float32", "bfloat16")),
    (lambda a, b: dict(c=torch.zeros(8, 5).t().to(BF16), beta=1.0), ValueError, ("c", "contiguous")),
    (lambda a, b: dict(c=torch.zeros(5, 4).to(BF16), beta=1.0, activation="swiglu"), NotImplementedError,
     ("c", "swiglu")),
    (lambda a, b: dict(alpha="2"), TypeError, ("alpha", "str")),
    (lambda a, b: dict(out=torch.zeros(5, 7).to(BF16)), ValueError, ("out", "(5, 7)")),
    (lambda a, b: dict(out=torch.zeros(5, 8, dtype=torch.int32)), TypeError, ("out: dtype", "int32")),
    (lambda a, b: dict(out=torch.zeros(5, 8).double()), TypeError, ("out: dtype", "float64")),
    (lambda a, b: dict(out=torch.zeros(5, 8), out_dtype=BF16), TypeError, ("out", "out_dtype")),
    (lambda a, b: dict(out=torch.zeros(8, 5).to(BF16).t()), ValueError, ("out", "contiguous")),
    (lambda a, b: dict(out=torch.zeros(1, 8).to(BF16).expand(5, 8)), ValueError, ("out", "share memory")),
    (lambda a, b: dict(out=torch.zeros(100).to(BF16).as_strided((5, 8), (4, 1))), ValueError, ("out", "share memory")),
    (lambda a, b: dict(out=a[:, :8]), ValueError, ("out", "shares memory with a")),
    (lambda a, b: dict(out=torch.zeros(5, 8, device="meta").to(BF16)), ValueError, ("out", "meta")),
    (lambda a, b: dict(out=[1]), TypeError, ("out", "list")),
    (lambda a, b: dict(out=torch.zeros(5, 8).to(BF16).requires_grad_()), RuntimeError, ("out", "gradient")),
    (lambda a, b: dict(out=torch.zeros(5, 8).to(BF16), bias=torch.zeros(8).requires_grad_()), RuntimeError,
     ("out", "gradient")),
)


@pytest.mark.parametrize("change, error, words", BAD)
def test_bad_input_is_named(change, error, words):
    a, b = operands()
    with pytest.raises(error) as caught:
        tkq.gemm(a, b, **change(a, b))
    assert all(w in str(caught.value) for w in words), str(caught.value)


def test_an_odd_number_of_columns_has_no_halves():
    with pytest.raises(ValueError, match="N must be even"):
        tkq.gemm(*operands(n=7), activation="swiglu")


def test_a_function_of_ones_own_has_no_gradient():
    a, b = operands()
    with pytest.raises(NotImplementedError, match="double"):
        tkq.gemm(a.requires_grad_(), b, activation=double)


# ---- names, specs, plans ----------------------------------------------------------------------------------


def test_names():
    assert name_of(None) == "" and name_of("silu") == "silu" and name_of(double) == f"{__name__}:double"
    assert not is_located("silu") and not is_located(name_of(double)) and is_located(name_of(masked))
    assert sources(Epilogue(name_of(double))) == (__name__,) and sources(Epilogue("silu")) == ()
    assert len(inspect.signature(double).parameters) == 1


@pytest.mark.parametrize("field, value", (("bias", "e4m3"), ("activation", "tanh")))
def test_an_epilogue_that_no_kernel_takes_is_named(field, value):
    with pytest.raises(NotImplementedError, match=f"{field} is '{value}'"):
        Epilogue(**{field: value})


def test_combinations_that_no_kernel_takes_are_named():
    with pytest.raises(NotImplementedError, match="swiglu"):
        Epilogue("swiglu", residual=True)
    with pytest.raises(NotImplementedError, match="accumulate"):
        GemmSpec(accumulate=True, epilogue=Epilogue("silu"))
    with pytest.raises(NotImplementedError, match="interleaved"):
        GemmSpec(epilogue=Epilogue("swiglu_interleaved"))
    with pytest.raises(NotImplementedError, match="batch is 'c'"):
        GemmSpec(batch="c")


@pytest.mark.parametrize("activation, overlap_epilogue", (("", 1), ("relu", 1), ("silu", 4), ("swiglu", 2)))
def test_an_activation_is_computed_under_the_next_tile(activation, overlap_epilogue):
    spec = GemmSpec(b_major="k", epilogue=Epilogue(activation, bias="bf16"))
    config = plan(spec, 4096, 4096, 4096, 132)
    assert (config.hold_in_registers and config.defer_activation is (overlap_epilogue > 1)
            and config.overlap_epilogue == overlap_epilogue)
    assert not plan(GemmSpec(out="fp32", b_major="k", epilogue=spec.epilogue), 4096, 4096, 4096, 132).defer_activation
    assert configure_epilogue(Config(hold_in_registers=False), spec).defer_activation is False


def test_what_is_held():
    assert can_hold_in_registers(GemmSpec(epilogue=Epilogue(residual=True, residual_pairs=True)))
    odd = GemmSpec(epilogue=Epilogue(residual=True))
    assert not can_hold_in_registers(odd) and not fit_to_spec(Config(overlap_epilogue=1), odd).overlap_epilogue
    with pytest.raises(ValueError, match="defer_activation"):
        Config(defer_activation=True).check(GemmSpec())


def test_a_batch_fills_the_sms():
    spec = GemmSpec(batch="ab")
    assert plan(spec, 512, 512, 4096, 132, batches=1).m == 64
    assert plan(spec, 512, 512, 4096, 132, batches=64).m == 128
    assert planned_kernel(spec, 512, 512, 4096, 132, batches=64)[1] <= 132


def test_the_paths_of_a_call(monkeypatch):
    """Which kernel a call gets, from the strides: seen at the door of the launcher. Nothing is copied before."""
    Key = collections.namedtuple("Key", "dtype out ways size epilogue")

    def launcher(kind, config):
        seen.append(Key(*kind[:5]))
        return lambda *args: None, 1

    seen = []
    monkeypatch.setattr(call, "_launcher", launcher)
    monkeypatch.setattr(realign_plan, "plan", lambda problem: None)

    def path(a, b, out=None, **extra):
        out = torch.empty(call.shape_of(a, b, extra.get("activation", "")), dtype=BF16) if out is None else out
        call.run(a, b, out, extra=call.Extra(**extra) if extra else call.PLAIN)
        return seen[-1]

    def by_tma(*args, **extra):
        return path(*args, **extra).ways[2:4]

    a, b = torch.empty(64, 128, dtype=BF16), torch.empty(128, 256, dtype=BF16)
    assert path(a, b) == (BF16, BF16, (True, False, True, True, False), (64, 256, 128), ())
    assert by_tma(a, b[:, 1:]) == (False, False) and by_tma(a, b[:, :7]) == (True, False)
    assert by_tma(a, b, activation="swiglu") == (True, True)
    assert by_tma(a, b, activation="swiglu_interleaved") == (False, False)
    assert by_tma(a, b.t().contiguous().t(), activation="swiglu_interleaved") == (True, True)
    assert by_tma(a, b[:, :24], activation="swiglu") == (False, False)  # halves of 12 columns
    c = torch.empty(64, 256, dtype=BF16)
    assert path(a, b, c=c, beta=1.0).epilogue == ("", None, True, True, False, False)
    assert path(a, b, c=c, beta=0.5, alpha=2.0, bias=c[0]).epilogue == ("", BF16, True, True, True, True)
    odd = torch.empty(64, 257, dtype=BF16)[:, 1:]
    assert path(a, b, c=odd, beta=1.0).epilogue[3] is False
    a3, b3 = a.expand(3, 64, 128), torch.empty(3, 128, 256, dtype=BF16)
    whole = a3.contiguous()
    assert path(a3, b3).size == (64, 256, 128, 3, "b") and path(whole, b3).size == (64, 256, 128, 3, "ab")
    assert path(whole, b.expand(3, 128, 256)).size == (64, 256, 128, 3, "a") and by_tma(whole, b3) == (True, True)
    apart = torch.empty(3, 64 * 128 + 4, dtype=BF16)[:, :-4].view(3, 64, 128)
    assert by_tma(apart, b3) == (False, False)


def test_out_over_b_in_a_call_like_those_before():
    memory = torch.zeros(520 * 520 + 300 * 520, dtype=BF16)
    a, b = torch.zeros(300, 520, dtype=BF16), memory[:520 * 520].view(520, 520).t()
    with fake_gpu.launches(), torch.no_grad():
        for _ in range(2):
            tkq.gemm(a, b, out=memory[520 * 520:].view(300, 520))
        with pytest.raises(ValueError, match="shares memory with b"):
            tkq.gemm(a, b, out=memory[520 * 520 - 8:-8].view(300, 520))
