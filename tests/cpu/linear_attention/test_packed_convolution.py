"""The short convolution of packed sequences on the CPU, in float64: each sequence as if it were alone."""
import itertools

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import tkq
from tkq.linear_attention.short_convolution import ShortConvolution, causal_conv1d

CUTS = {"whole": [0, 9], "short": [0, 1, 1, 3, 9], "around": [2, 5, 8], "falling": [-3, 4, 2, 99], "none": [9, 9],
        "no": [4]}
BOUNDS = {"falling": [0, 4, 4, 9]}


def alone(x, weight, bias, states, cuts):
    y, last = torch.zeros_like(x), states.clone()
    for n, (a, e) in enumerate(itertools.pairwise(cuts)):
        y[:, a:e], last[n:n + 1] = causal_conv1d(x[:, a:e], weight, bias, "silu", states[n:n + 1], True)
    return y, last


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("bias", [True, False])
def test_each_is_as_alone(cuts, width, bias):
    torch.manual_seed(0)
    cu, bounds = torch.tensor(CUTS[cuts]), BOUNDS.get(cuts, CUTS[cuts])
    x, weight, b, states = (torch.randn(s, dtype=torch.float64) for s in (
        (1, 9, 6), (6, width), (6,), (len(cu) - 1, 6, width - 1)))
    leaves = [t.requires_grad_() for t in (x, weight, b, states)]
    b = b if bias else None
    found, last = causal_conv1d(x, weight, b, "silu", states, True, cu)
    want, wanted = alone(x.clone(), weight, b, states, bounds)
    inside = slice(bounds[0], bounds[-1])
    torch.testing.assert_close(found[:, inside], want[:, inside])
    assert torch.equal(last, wanted) and found.is_contiguous()
    dy, dlast = torch.randn_like(found), torch.randn_like(last)
    dy[:, :bounds[0]], dy[:, bounds[-1]:] = 0, 0
    got, right = (torch.autograd.grad((y * dy).sum() + (s * dlast).sum(), leaves, allow_unused=True)
                  for y, s in ((found, last), (want, wanted)))
    for a, e in zip(got, right):
        assert (a is None or not a.any()) if e is None else a is not None or not e.any()
        if a is not None and e is not None:
            torch.testing.assert_close(a, e)
    zeros = torch.zeros_like(states)
    assert torch.equal(causal_conv1d(x, weight, b, "silu", cu_seqlens=cu),
                       causal_conv1d(x, weight, b, "silu", zeros, cu_seqlens=cu))


@pytest.mark.parametrize("tokens", [0, 4])
@pytest.mark.parametrize("cuts", [[0], [2], [0, 0, 0], [0, 2], [1, 3]])
@pytest.mark.parametrize("width", [1, 4])
def test_tokens_of_no_sequence_are_0(tokens, cuts, width):
    """As `tkq.causal_conv1d` has it: taps reach behind a sequence, and a bias everywhere. No tokens are none too."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(1, tokens, 6), torch.randn(6, width), torch.randn(6)
    states = torch.randn(len(cuts) - 1, 6, width - 1)
    y, last = causal_conv1d(x, weight, bias, "silu", states, True, torch.tensor(cuts))
    assert y.shape == x.shape and last.shape == states.shape
    first, end = (min(cuts[i], tokens) for i in (0, -1))
    assert not y[:, :first].any() and not y[:, end:].any() and (y[:, first:end] != 0).all()
    if width > 1:
        want, wanted = tkq.causal_conv1d(x, weight, bias, "silu", states, True, torch.tensor(cuts))
        torch.testing.assert_close(y, want)
        assert torch.equal(last, wanted)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("tokens", [0, 2, 9])
def test_types(packed, tokens):
    """Of x and of the state, as `tkq.causal_conv1d` has them; under autocast too."""
    x, weight, bias = torch.randn(1, tokens, 6).bfloat16(), torch.randn(6, 4).bfloat16(), torch.randn(6)
    cu, state = torch.tensor([0, tokens]) if packed else None, torch.randn(1, 6, 3)
    for given in (None, state):
        found, want = (conv(x, weight, bias, None, given, True, cu) for conv in (causal_conv1d, tkq.causal_conv1d))
        torch.testing.assert_close(found, want)
    with torch.autocast("cpu", torch.bfloat16):
        for given in (None, state):
            y, last = causal_conv1d(x.float(), weight.float(), bias, None, given, True, cu)
            assert y.dtype == torch.bfloat16 and last.dtype == (torch.bfloat16 if given is None else torch.float32)


def test_no_tokens_have_gradients():
    x, weight, bias = torch.randn(2, 0, 6), torch.randn(6, 4, requires_grad=True), torch.randn(6, requires_grad=True)
    causal_conv1d(x, weight, bias, "silu").sum().backward()
    assert not weight.grad.any() and not bias.grad.any()


def test_what_no_sequence_has_reaches_nothing():
    x, weight = torch.randn(1, 9, 6), torch.randn(6, 4, requires_grad=True)
    x[:, :2], x[:, 7:] = torch.nan, torch.inf
    x.requires_grad_()
    y = causal_conv1d(x, weight, None, "silu", cu_seqlens=torch.tensor([2, 5, 7]))
    y[:, 2:7].sum().backward()
    assert y.isfinite().all() and x.grad.isfinite().all() and weight.grad.isfinite().all() and x.grad[:, 2:7].all()


def test_a_sequences_nan_stays_in_it():
    x = torch.randn(1, 9, 6)
    x[:, 4] = torch.nan
    y, last = causal_conv1d(x, torch.randn(6, 4), None, "silu", None, True, torch.tensor([0, 5, 9]))
    assert y[:, 5:].isfinite().all() and last[1].isfinite().all() and y[:, 4].isnan().all()


@pytest.mark.parametrize("changed, error, words", [
    (dict(cu_seqlens=[0, 7]), TypeError, "cu_seqlens: got list"),
    (dict(cu_seqlens=torch.zeros(1, 2, dtype=torch.int32)), ValueError, "cu_seqlens: has 2 dimensions"),
    (dict(cu_seqlens=torch.zeros(0, dtype=torch.int64)), ValueError, "cu_seqlens: has 0 numbers"),
    *((dict(cu_seqlens=torch.tensor([0, 7]).to(wrong)), TypeError, f"cu_seqlens: dtype is {wrong}, allowed are")
      for wrong in (torch.float32, torch.bool, torch.uint8, torch.int16)),
    (dict(x=torch.zeros(1, 7, 6, dtype=torch.int32)), TypeError, "x: dtype is torch.int32, allowed are .*float64"),
    *((dict(initial_state=torch.zeros(1, 6, 3, dtype=wrong)), TypeError, f"initial_state: dtype is {wrong}, allowed")
      for wrong in (torch.int32, torch.complex64)),
    (dict(output_final_state="no"), TypeError, "output_final_state: got 'no', allowed are True and False"),
    (dict(activation="relu"), ValueError, "activation: got 'relu', allowed are 'silu', and None"),
    (dict(bias=torch.zeros(5)), ValueError, r"bias: shape is \(5,\), expected \(6\)"),
    (dict(x=torch.zeros(2, 7, 6)), ValueError, "cu_seqlens: has 2 numbers, .* x has 2 rows, allowed .* is 1"),
    (dict(initial_state=torch.zeros(2, 6, 3)), ValueError, r"initial_state: .* expected \(1, 6, 3\)"),
])
def test_what_is_refused(changed, error, words):
    given = dict(x=torch.zeros(1, 7, 6), weight=torch.zeros(6, 4), cu_seqlens=torch.tensor([0, 7])) | changed
    with pytest.raises(error, match=f"causal_conv1d: {words}"):
        causal_conv1d(**given)


@pytest.mark.parametrize("name", ["cu_seqlens", "initial_state", "bias", "weight"])
def test_other_devices(name):
    given = dict(x=torch.zeros(1, 7, 6), weight=torch.zeros(6, 4), bias=torch.zeros(6), cu_seqlens=torch.tensor([0, 7]),
                 initial_state=torch.zeros(1, 6, 3))
    with pytest.raises(ValueError, match=f"{name}: is on meta, but x is on cpu"):
        causal_conv1d(**given | {name: given[name].to("meta")})


@pytest.mark.parametrize("changed, error, words", [
    (dict(width=0), ValueError, "width is 0, allowed are ints from 1 on"),
    (dict(width=-7), ValueError, "width is -7"),
    (dict(width=True), TypeError, "width: got True"),
    (dict(width=[3]), TypeError, r"width: got \[3\], allowed are ints"),
    (dict(channels="x"), TypeError, "channels: got 'x', allowed are ints"), (dict(bias=1), TypeError, "bias: got 1"),
    (dict(activation="relu"), ValueError, "activation: got 'relu', allowed are 'silu', and None"),
    (dict(activation=1), TypeError, "activation: got 1, allowed are 'silu', and None"),
])
def test_modules_that_are_refused(changed, error, words):
    with pytest.raises(error, match=f"ShortConvolution: {words}"):
        ShortConvolution(**dict(channels=6, width=4) | changed)


@pytest.mark.parametrize("op", ["causal_conv1d", "linear_attn"])
def test_any_number_of_sequences_compiles_once(op):
    torch._dynamo.reset()
    x, weight = torch.randn(1, 24, 32), torch.randn(32, 4)
    q = torch.randn(1, 24, 2, 32).bfloat16()
    calls = {"causal_conv1d": lambda cu: tkq.causal_conv1d(x, weight, cu_seqlens=cu),
             "linear_attn": lambda cu: tkq.linear_attn(q, q, q, cu_seqlens=cu)}
    counter = CompileCounter()
    compiled = torch.compile(calls[op], backend=counter, fullgraph=True, dynamic=True)
    for n in range(3, 12):
        cu = torch.linspace(0, 24, n).int()
        torch.testing.assert_close(compiled(cu), calls[op](cu))
    assert counter.frame_count == 1
