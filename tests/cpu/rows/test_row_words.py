"""What rows' functions refuse: the caller's own argument is named, also those that would be ignored or not finite."""
import math

import pytest
import torch

import tkq

X, W = torch.zeros(4, 64), torch.ones(64)
B16 = torch.zeros(4, 64, dtype=torch.bfloat16)
CLASSES = torch.zeros(4, dtype=torch.long)
V = torch.zeros(7, 64, dtype=torch.bfloat16)
FLAT, STARTS, COS = torch.zeros(5, 2, 8), torch.tensor([0, 2, 5], dtype=torch.int32), torch.ones(9, 4)
NOT_FINITE = (math.nan, math.inf, -math.inf)


@pytest.mark.parametrize("call, words", [
    (lambda v: tkq.rmsnorm(X, W, weight_offset=v), "rmsnorm: weight_offset: got"),
    (lambda v: tkq.layernorm(X, W, eps=v), "layernorm: eps: got"),
    (lambda v: tkq.rmsnorm_quant(X, W, weight_offset=v), "rmsnorm_quant: weight_offset: got"),
    (lambda v: tkq.layernorm_quant(X, W, eps=v), "layernorm_quant: eps: got"),
    (lambda v: tkq.softmax(X, scale=v), "softmax: scale: got"),
    (lambda v: tkq.log_softmax(X, dim=0, scale=v), "log_softmax: scale: got"),
    (lambda v: tkq.cross_entropy(X, CLASSES, softcap=v), "cross_entropy: softcap: got"),
    (lambda v: tkq.cross_entropy(X, CLASSES, z_loss=v), "cross_entropy: z_loss: got"),
    (lambda v: tkq.cross_entropy(X, CLASSES, label_smoothing=v), "cross_entropy: label_smoothing: got"),
    (lambda v: tkq.cross_entropy_and_gradient(X, CLASSES, z_loss=v), "cross_entropy_and_gradient: z_loss: got"),
    (lambda v: tkq.linear_cross_entropy(B16, V, CLASSES, softcap=v), "linear_cross_entropy: softcap: got"),
    (lambda v: tkq.linear_cross_entropy(B16, V, CLASSES, z_loss=v), "linear_cross_entropy: z_loss: got"),
])
def test_numbers_that_are_not_finite_are_refused(call, words):
    for value in NOT_FINITE:
        with pytest.raises(ValueError, match=f"^{words} {value}, allowed are"):
            call(value)
    with pytest.raises(TypeError, match=f"^{words} str, expected a float"):
        call("a")


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_an_option_that_is_none_is_not_taken_for_zero(kind):
    for name in (kind, kind + "_quant"):
        with pytest.raises(TypeError, match=f"^{name}: weight_offset: got NoneType, expected a float"):
            getattr(tkq, name)(X, W, weight_offset=None)


@pytest.mark.parametrize("call, error, words", [
    (lambda: tkq.rmsnorm_quant(X, weight_offset=1.0), ValueError, "rmsnorm_quant: weight_offset is 1.0, but there is"),
    (lambda: tkq.layernorm_quant(X, residual_dtype=torch.float16), ValueError, "layernorm_quant: residual_dtype is"),
    (lambda: tkq.rmsnorm_quant(torch.zeros(3, 0)), ValueError, "rmsnorm_quant: x: got shape"),
    (lambda: tkq.linear_cross_entropy(B16, V, CLASSES, class_weight=torch.ones(8)), ValueError, "class_weight: shape"),
    (lambda: tkq.linear_cross_entropy(B16, V, CLASSES, class_weight=torch.ones(7, dtype=torch.int32)), TypeError,
     "class_weight: dtype is"),
    (lambda: tkq.linear_cross_entropy(B16, V, CLASSES, class_weight=torch.ones(14)[::2]), ValueError,
     "class_weight: strides"),
    (lambda: tkq.linear_cross_entropy(B16, V[:1].expand((1 << 19) + 1, 64), CLASSES), NotImplementedError,
     "weight: got V = 524289 classes"),
    (lambda: tkq.linear_cross_entropy(B16[0, 0], V, CLASSES[0]), ValueError, "x: got shape ()"),
    (lambda: tkq.cross_entropy(X, CLASSES, weight=torch.ones(8)), ValueError, "weight: shape"),
    (lambda: tkq.rope(FLAT, COS, COS, cu_seqlens=STARTS, max_seqlen="a"), TypeError,
     "rope: max_seqlen: got str, expected an int"),
    (lambda: tkq.rope(FLAT, COS, COS, cu_seqlens=STARTS, max_seqlen=3, seqlen_offsets="a"), TypeError,
     "rope: seqlen_offsets: got str"),
    (lambda: tkq.rope_qk(FLAT[None], FLAT[None], COS, COS, max_seqlen=3), ValueError,
     "rope_qk: max_seqlen: got 3, which"),
    (lambda: tkq.swiglu(X, X, layout="x"), ValueError, "swiglu: layout: got 'x'"),
    (lambda: tkq.geglu(X, layout="x"), ValueError, "geglu: layout: got 'x'"),
    (lambda: tkq.geglu(X, X, approximate="tanh", layout=None), TypeError, "geglu: layout: got None"),
])
def test_the_callers_argument_is_named(call, error, words):
    with pytest.raises(error) as found:
        call()
    assert str(found.value).startswith(words), found.value
