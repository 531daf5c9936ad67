"""tkq.nn beside torch.nn: results, gradients, state dicts and what they print."""
import ast
import copy
import inspect
import pathlib
import pickle

import pytest
import torch
from torch import nn

import tkq
import tkq.nn
from tkq.testing import assert_2x

PAIRS = [(tkq.nn.RMSNorm, nn.RMSNorm), (tkq.nn.LayerNorm, nn.LayerNorm)]
ARGUMENTS = [dict(normalized_shape=48), dict(normalized_shape=(48,)), dict(normalized_shape=[3, 16]),
             dict(normalized_shape=(3, 4, 4), elementwise_affine=False), dict(normalized_shape=48, eps=1e-3)]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def both(pair, arguments, dtype=torch.float32):
    ours, theirs = pair[0](**arguments, dtype=dtype), pair[1](**arguments, dtype=dtype)
    for p in theirs.parameters():
        nn.init.normal_(p)
    assert ours.load_state_dict(theirs.state_dict()).missing_keys == []
    return ours, theirs


def shape_of(arguments):
    shape = arguments["normalized_shape"]
    return (5, 2, *(shape if isinstance(shape, (tuple, list)) else (shape,)))


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_and_gradients_are_torchs(pair, arguments, dtype):
    ours, theirs = both(pair, arguments, dtype)
    exact = copy.deepcopy(theirs).double()
    if dtype is torch.bfloat16 and pair[1] is nn.RMSNorm and theirs.eps is None:
        exact.eps = torch.finfo(torch.float32).eps
    x = torch.randn(shape_of(arguments)).to(dtype)
    dy = torch.randn_like(x)
    results = []
    for module in (ours, exact, theirs):
        leaf = x.detach().to(torch.float64 if module is exact else dtype).requires_grad_()
        y = module(leaf)
        y.backward(dy.to(y.dtype))
        assert y.shape == x.shape
        results.append([y, leaf.grad, *(p.grad for p in module.parameters())])
    for mine, truth, torchs in zip(*results, strict=True):
        assert mine.dtype == dtype
        assert_2x(mine.detach(), truth.detach(), torchs.detach(), ulps=2, bias_ulps=0.1)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_state_and_text_are_torchs(pair, arguments):
    ours, theirs = both(pair, arguments)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert theirs.load_state_dict(ours.state_dict()).missing_keys == []
    assert repr(ours) == repr(theirs) and isinstance(ours, pair[1])
    ours.reset_parameters()
    assert all((p == (0 if name == "bias" else 1)).all() for name, p in ours.named_parameters())


def test_a_layernorm_without_bias():
    ours = tkq.nn.LayerNorm(32, bias=False)
    assert list(ours.state_dict()) == ["weight"]
    x = torch.randn(4, 32)
    assert torch.allclose(ours(x), nn.LayerNorm(32, bias=False)(x), atol=1e-6)


@pytest.mark.parametrize("module", [tkq.nn.RMSNorm, tkq.nn.LayerNorm])
@pytest.mark.parametrize("shape", [(7,), (4, 7), (16, 3)])
def test_another_shape_is_refused(module, shape):
    for normalized in (16, (3, 16)):
        with pytest.raises(ValueError, match=r"(x|input): shape is .*normalized_shape"):
            module(normalized)(torch.ones(shape))


@pytest.mark.parametrize("pair", PAIRS)
def test_a_last_dimension_that_is_not_contiguous_is_copied(pair):
    for arguments in ARGUMENTS:
        ours, theirs = both(pair, arguments)
        wide = torch.randn(*shape_of(arguments), 2)
        wanted, wanted_grad = (found(theirs, wide[..., 1], {}) for found in (value, gradient))
        assert torch.allclose(ours(wide[..., 1]), wanted, atol=1e-6)
        assert torch.allclose(gradient(ours, wide[..., 1], {}), wanted_grad, atol=1e-5)


def value(module, x, rest):
    return module(x, **rest)


def gradient(module, x, rest):
    """Of x, a view or not."""
    leaf = x.detach().requires_grad_()
    y = module(leaf, **rest)
    weights = torch.linspace(-1, 2, y.numel()).view(y.shape).to(y.dtype)
    return torch.autograd.grad((y * weights).sum(), leaf)[0]


def test_arguments_have_torchs_names():
    x, target = torch.randn(5, 16), torch.arange(5)
    assert torch.allclose(tkq.nn.LayerNorm(16)(input=x), nn.LayerNorm(16)(input=x), atol=1e-6)
    assert torch.allclose(tkq.nn.RMSNorm(16)(x=x), nn.RMSNorm(16)(x=x), atol=1e-6)
    assert torch.allclose(tkq.nn.CrossEntropyLoss()(input=x, target=target), nn.CrossEntropyLoss()(x, target))
    assert torch.allclose(tkq.nn.Softmax(dim=-1)(input=x), x.softmax(-1), atol=1e-7)
    layer = tkq.nn.Linear(16, 8, dtype=torch.bfloat16)
    assert torch.equal(layer(input=x.bfloat16()), layer(x.bfloat16()))


# ---- cross entropy --------------------------------------------------------------------------------------------------

WEIGHT = torch.tensor([0.5, 2.0, 1.0, 0.0, 3.0, 1.5, 0.25])
OPTIONS = [dict(), dict(reduction="sum"), dict(reduction="none"), dict(weight=WEIGHT), dict(ignore_index=2),
           dict(label_smoothing=0.1), dict(weight=WEIGHT, ignore_index=4, label_smoothing=0.3, reduction="none")]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", [(7,), (9, 7), (2, 7, 5), (2, 7, 3, 4)])
def test_cross_entropy_is_torchs(options, shape):
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    target = torch.arange(logits.numel() // 7).view(shape[:1] + shape[2:] if len(shape) > 1 else ()) % 7
    ours, theirs = tkq.nn.CrossEntropyLoss(**options), nn.CrossEntropyLoss(**options)
    assert torch.allclose(ours(logits, target), theirs(logits, target), rtol=1e-5, atol=1e-6)
    mine, truth = (gradient(m, logits, dict(target=target)) for m in (ours, theirs))
    assert mine.shape == logits.shape and torch.allclose(mine, truth, rtol=1e-5, atol=1e-7)
    assert list(ours.state_dict()) == list(theirs.state_dict()) and isinstance(ours, nn.CrossEntropyLoss)
    assert repr(ours) == repr(theirs)
    again = pickle.loads(pickle.dumps(ours))
    assert torch.equal(again(logits, target), ours(logits, target))


def test_cross_entropy_of_transposed_logits():
    logits, target = torch.randn(7, 9).t(), torch.arange(9) % 7
    ours, theirs = tkq.nn.CrossEntropyLoss(), nn.CrossEntropyLoss()
    assert torch.allclose(ours(logits, target), theirs(logits, target))
    assert torch.allclose(*(gradient(m, logits, dict(target=target)) for m in (ours, theirs)), rtol=1e-5, atol=1e-7)


def test_what_torch_has_not_is_passed_on_and_shown():
    logits, target = torch.randn(5, 7), torch.arange(5)
    module = tkq.nn.CrossEntropyLoss(z_loss=1e-2, softcap=3.0, inplace_backward=True)
    assert repr(module) == "CrossEntropyLoss(z_loss=0.01, softcap=3.0, inplace_backward=True)"
    assert torch.equal(module(logits, target), tkq.cross_entropy(logits, target, z_loss=1e-2, softcap=3.0))
    leaf = logits.requires_grad_()
    with pytest.raises(RuntimeError, match="leaf"):
        module(leaf, target)


@pytest.mark.parametrize("target, error, words", [
    (torch.rand(5, 7), NotImplementedError, "target: got probabilities"),
    (torch.zeros(5, dtype=torch.uint8), TypeError, "target: dtype is torch.uint8")])
def test_other_targets_are_refused(target, error, words):
    with pytest.raises(error, match=words):
        tkq.nn.CrossEntropyLoss()(torch.randn(5, 7), target)


def test_the_loss_of_a_linear_layer():
    x, target = torch.randn(3, 6, 16).bfloat16(), torch.arange(18).view(3, 6) % 7
    for options in OPTIONS[:-1]:
        module = tkq.nn.LinearCrossEntropyLoss(16, 7, **options)
        assert set(module.state_dict()) == {"linear.weight", *({"weight"} & set(options))}
        rest = {name: v for name, v in options.items() if name != "weight"}
        wanted = tkq.linear_cross_entropy(x, module.linear.weight, target, class_weight=options.get("weight"), **rest)
        assert torch.equal(module(x, target), wanted)
        apart = nn.CrossEntropyLoss(**options)((x.double() @ module.linear.weight.double().t()).movedim(-1, 1).float(),
                                               target)
        assert torch.allclose(wanted, apart, rtol=2e-2, atol=2e-2)
    module(x, target).sum().backward()
    assert module.linear.weight.grad.abs().sum() > 0
    wide = torch.randn(18, 16, 2).bfloat16()[..., 0]
    assert torch.equal(module(wide, target.view(18)), module(wide.contiguous(), target.view(18)))
    assert "label_smoothing=0.1" in repr(module) and "in_features=16" in repr(module)


# ---- softmax, gates, positions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize("dim", [-1, 0, 1])
def test_softmax_is_torchs(name, dim):
    ours, theirs = getattr(tkq.nn, name)(dim), getattr(nn, name)(dim)
    x = torch.randn(3, 4, 5)
    for given in (x, x.transpose(0, 2)):
        assert torch.allclose(ours(given), theirs(given), atol=1e-6)
        assert torch.allclose(gradient(ours, given, {}), gradient(theirs, given, {}), atol=1e-6)
    assert repr(ours) == repr(theirs) and isinstance(ours, type(theirs))
    scaled = getattr(tkq.nn, name)(dim, scale=0.5)
    assert torch.allclose(scaled(x), theirs(x * 0.5), atol=1e-6) and repr(scaled) == f"{name}(dim={dim}, scale=0.5)"
    with pytest.raises(NotImplementedError, match=f"{name}: dim: got None"):
        getattr(tkq.nn, name)()


def test_gates():
    gate, up = torch.randn(4, 6), torch.randn(4, 6)
    silu, gelu = nn.functional.silu, nn.functional.gelu
    assert torch.allclose(tkq.nn.SwiGLU()(gate, up), silu(gate) * up, atol=1e-6)
    assert torch.allclose(tkq.nn.SwiGLU()(torch.cat((gate, up), 1)), silu(gate) * up, atol=1e-6)
    both_ = torch.stack((gate, up), 2).flatten(1)
    assert torch.allclose(tkq.nn.SwiGLU("interleaved")(both_), silu(gate) * up, atol=1e-6)
    for approximate in ("none", "tanh"):
        module = tkq.nn.GEGLU(approximate)
        assert torch.allclose(module(gate, up), gelu(gate, approximate=approximate) * up, atol=1e-6)
        assert repr(module) == f"GEGLU(approximate={approximate!r}, layout='split')"


def test_positions():
    module = tkq.nn.RotaryEmbedding(8, 32, 1e4)
    q, k = torch.randn(2, 5, 4, 16), torch.randn(2, 5, 2, 16)
    cos, sin = tkq.rope_cos_sin(32, 8, 1e4, device="cpu")
    for mine, wanted in zip(module(q, k, seqlen_offsets=3), tkq.rope_qk(q, k, cos, sin, seqlen_offsets=3)):
        assert torch.equal(mine, wanted)
    ids = torch.arange(5).flip(0)[None]
    for mine, wanted in zip(module(q, k, position_ids=ids), tkq.rope_qk(q, k, cos, sin, position_ids=ids)):
        assert torch.equal(mine, wanted)
    for cast in (module.bfloat16(), module.to("meta").to_empty(device="cpu"), copy.deepcopy(module)):
        assert torch.equal(cast.cos, cos) and torch.equal(cast.sin, sin) and not cast.state_dict()


def test_tables_are_the_modules_own():
    """What is written to one module's changes neither another's nor a table; it goes with the module."""
    one, other = (tkq.nn.RotaryEmbedding(8, 32) for _ in range(2))
    cos, sin = tkq.rope_cos_sin(32, 8, device="cpu")
    copied = copy.deepcopy(one)
    one.cos.mul_(2), one.sin.zero_()
    for untouched in (other, copied, tkq.nn.RotaryEmbedding(8, 32)):
        assert torch.equal(untouched.cos, cos) and torch.equal(untouched.sin, sin)
    assert all(torch.equal(t, want) for t, want in zip(tkq.rope_cos_sin(32, 8, device="cpu"), (cos, sin)))
    for moved in (one.bfloat16(), one.to("cpu", torch.float64), one.to_empty(device="cpu"), copy.deepcopy(one)):
        assert torch.equal(moved.cos, 2 * cos) and moved.cos.dtype == torch.float32 and not moved.sin.any()
    one.reset_parameters()
    assert torch.equal(one.cos, cos) and torch.equal(one.sin, sin)
    assert not one.state_dict() and one.load_state_dict({}) and [n for n, _ in one.named_buffers()] == ["cos", "sin"]


def test_tables_from_the_meta_device():
    """By a model's to_empty, and module by module, as FSDP does it."""
    cos, sin = tkq.rope_cos_sin(32, 8, device="cpu")
    with torch.device("meta"):
        model = nn.Sequential(tkq.nn.RotaryEmbedding(8, 32), nn.Linear(4, 4))
    assert model[0].cos.is_meta
    whole = copy.deepcopy(model).to_empty(device="cpu")
    model[0].to_empty(device="cpu", recurse=False).reset_parameters()
    for module in (whole[0], model[0]):
        assert torch.equal(module.cos, cos) and torch.equal(module.sin, sin)


@pytest.mark.parametrize("granularity", ("row", "1x128"))
@pytest.mark.parametrize("name", ("RMSNorm", "LayerNorm"))
def test_norms_that_quantise(name, granularity):
    """What the function gives, with the plain norm's parameters and state dict; into a product, too."""
    plain = getattr(tkq.nn, name)(256)
    ours = getattr(tkq.nn, f"{name}Quant")(256, granularity=granularity)
    for parameter in plain.parameters():
        nn.init.normal_(parameter)
    ours.load_state_dict(plain.state_dict())
    assert f"granularity={granularity!r}" in repr(ours) and list(ours.state_dict()) == list(plain.state_dict())
    x, residual = torch.randn(2, 6, 256).to(BF16), torch.randn(2, 6, 256)
    function = getattr(tkq, f"{name.lower()}_quant")
    options = dict(eps=torch.finfo(torch.float32).eps) if name == "RMSNorm" else dict(bias=plain.bias, eps=plain.eps)
    with torch.no_grad():
        for added in (None, residual):
            wanted = function(x, plain.weight, residual=added, prenorm=added is not None, granularity=granularity,
                              **options)
            found = ours(x, added)
            assert len(found) == len(wanted) == 2 + (added is not None)
            assert all(torch.equal(a.float(), b.float()) for a, b in zip(found, wanted))
        strided = torch.randn(2, 6, 512)[..., ::2]
        assert torch.equal(ours(x, strided)[2].float(), ours(x, strided.contiguous())[2].float())
        q, scale = ours(x.transpose(0, 1))
        y = plain(x.transpose(0, 1)).float().flatten(0, -2)
        again = q.float().flatten(0, -2) * scale.repeat_interleave(256 if granularity == "row" else 128, 1)
        assert (again - y).abs().max() <= y.abs().max() / 16
        of_a_weight = "row" if granularity == "row" else "128x128"
        weight, of_weight = tkq.quantize_fp8(torch.randn(32, 256).to(BF16), of_a_weight)
        assert tkq.fp8_gemm(q.flatten(0, -2), weight.t(), scale, of_weight.t()).shape == (12, 32)


X, ROWS, HEADS = torch.zeros(4, 64), torch.zeros(4, dtype=torch.int64), torch.zeros(1, 4, 2, 64)
WITHOUT_TENSORS = [  # (a module, its arguments, the name of the one that is replaced)
    *((module(shape), (X,), name) for shape in (64, (4, 64))
      for module, name in ((tkq.nn.RMSNorm, "x"), (tkq.nn.LayerNorm, "input"))),
    *((module(64, dtype=torch.bfloat16), (X, X), name) for name in ("x", "residual")
      for module in (tkq.nn.RMSNormQuant, tkq.nn.LayerNormQuant)),
    *((module(-1), (X,), "input") for module in (tkq.nn.Softmax, tkq.nn.LogSoftmax)),
    *((module(), (X, X), name) for name in ("gate", "up") for module in (tkq.nn.SwiGLU, tkq.nn.GEGLU)),
    *((tkq.nn.CrossEntropyLoss(), (X, ROWS), name) for name in ("input", "target")),
    *((tkq.nn.LinearCrossEntropyLoss(64, 32), (X.bfloat16(), ROWS), name) for name in ("input", "target")),
    *((tkq.nn.RotaryEmbedding(64, 8), (HEADS, HEADS), name) for name in ("q", "k")),
    (tkq.nn.Linear(64, 48), (X,), "input"),
    (tkq.nn.Fp8Linear(64, 48), (X,), "x"),
    (tkq.nn.GatedDeltaNet(64, num_heads=2, head_dim=32), (HEADS,), "x"),
    (tkq.nn.KimiDeltaAttention(64, num_heads=2, head_dim=32), (HEADS,), "x"),
    (tkq.nn.Mamba2(64, d_state=32, headdim=32), (HEADS,), "u"),
    (tkq.nn.HedgehogAttention(64, num_heads=2, head_dim=64), (HEADS,), "x"),
    (tkq.nn.BasedAttention(64, num_heads=2), (HEADS,), "x"),
    (tkq.nn.ShortConvolution(64, 4), (HEADS,), "x"),
    (tkq.nn.HyenaFilterConv(64, 16), (HEADS,), "u"),
]


@pytest.mark.parametrize("module, given, name", WITHOUT_TENSORS,
                         ids=[f"{type(module).__name__} {name}" for module, _, name in WITHOUT_TENSORS])
def test_what_is_no_tensor_is_named(module, given, name):
    at = list(inspect.signature(module.forward).parameters).index(name)
    for bad in ([1.0], 3, "a", *([] if name in ("residual", "up") else [None])):
        with pytest.raises(TypeError, match=rf"\b{name}: got {type(bad).__name__}, expected a torch.Tensor"):
            module(*given[:at], bad, *given[at + 1:])


MIXERS = [module for module, *_ in WITHOUT_TENSORS if hasattr(module, "hidden_size") or hasattr(module, "d_model")]


@pytest.mark.parametrize("module", MIXERS, ids=lambda module: type(module).__name__)
def test_mixers_of_another_type(module):
    """As torch.nn.Linear, but by name; autocast takes care of it."""
    x = torch.zeros(1, 8, 64).to(BF16)
    with pytest.raises(TypeError, match="dtype is torch.bfloat16, parameters are torch.float32"):
        module(x)
    with torch.autocast("cpu", dtype=BF16):
        assert module(x).dtype == BF16


@pytest.mark.parametrize("packed", [False, True])
def test_a_short_convolution_of_another_type(packed):
    """As on a GPU: computed in the wider type."""
    conv, x = tkq.nn.ShortConvolution(64, 4, bias=True), torch.randn(1, 9, 64).to(BF16)
    cu = torch.tensor([0, 4, 9], dtype=torch.int32) if packed else None
    y, state = conv(x, None, True, cu)
    wanted, last = conv(x.float(), None, True, cu)
    assert y.dtype == state.dtype == BF16 and torch.equal(y, wanted.to(BF16)) and torch.equal(state, last.to(BF16))


def test_norms_that_quantise_refuse():
    with pytest.raises(NotImplementedError, match="weight requires a gradient"):
        tkq.nn.RMSNormQuant(64)(torch.randn(2, 64))
    tkq.nn.RMSNormQuant(64).requires_grad_(False)(torch.randn(2, 64))
    with pytest.raises(NotImplementedError, match="RMSNormQuant: normalized_shape: got .4, 64."):
        tkq.nn.RMSNormQuant((4, 64))
    with pytest.raises(ValueError, match="granularity: got 'tensor'"):
        tkq.nn.LayerNormQuant(64, granularity="tensor").requires_grad_(False)(torch.randn(2, 64))
    with pytest.raises(ValueError, match="x: shape is"):
        tkq.nn.LayerNormQuant(64).requires_grad_(False)(torch.randn(2, 32))


# ---- torch.compile --------------------------------------------------------------------------------------------------

BF16 = torch.bfloat16
TRACED = {
    "RMSNorm": (lambda: tkq.nn.RMSNorm(16), lambda: (torch.randn(6, 16),)),
    "LayerNorm": (lambda: tkq.nn.LayerNorm(16), lambda: (torch.randn(6, 16),)),
    "Linear": (lambda: tkq.nn.Linear(16, 8, dtype=BF16), lambda: (torch.randn(2, 3, 16).to(BF16),)),
    "Softmax": (lambda: tkq.nn.Softmax(-1), lambda: (torch.randn(6, 16),)),
    "LogSoftmax": (lambda: tkq.nn.LogSoftmax(0), lambda: (torch.randn(6, 16),)),
    "CrossEntropyLoss": (lambda: tkq.nn.CrossEntropyLoss(), lambda: (torch.randn(6, 16), torch.arange(6))),
    "LinearCrossEntropyLoss": (lambda: tkq.nn.LinearCrossEntropyLoss(16, 8),
                               lambda: (torch.randn(6, 16).to(BF16), torch.arange(6))),
    "SwiGLU": (lambda: tkq.nn.SwiGLU(), lambda: (torch.randn(6, 16),)),
    "GEGLU": (lambda: tkq.nn.GEGLU(), lambda: (torch.randn(6, 16),)),
    "RotaryEmbedding": (lambda: tkq.nn.RotaryEmbedding(8, 9), lambda: tuple(torch.randn(2, 1, 9, 3, 8))),
    "RMSNormQuant": (lambda: tkq.nn.RMSNormQuant(16).requires_grad_(False), lambda: (torch.randn(6, 16),)),
    "LayerNormQuant": (lambda: tkq.nn.LayerNormQuant(16).requires_grad_(False), lambda: (torch.randn(6, 16),)),
    "Fp8Linear": (lambda: tkq.nn.Fp8Linear(16, 16, dtype=BF16), lambda: (torch.randn(16, 16).to(BF16),)),
    "GatedDeltaNet": (lambda: tkq.nn.GatedDeltaNet(16, num_heads=1, head_dim=32, dtype=BF16),
                      lambda: (torch.randn(2, 5, 16).to(BF16),)),
    "KimiDeltaAttention": (lambda: tkq.nn.KimiDeltaAttention(16, num_heads=1, head_dim=32, dtype=BF16),
                           lambda: (torch.randn(2, 5, 16).to(BF16),)),
    "Mamba2": (lambda: tkq.nn.Mamba2(16, d_state=32, headdim=32, dtype=BF16),
               lambda: (torch.randn(2, 5, 16).to(BF16),)),
    "HedgehogAttention": (lambda: tkq.nn.HedgehogAttention(16, num_heads=1, head_dim=64, dtype=BF16),
                          lambda: (torch.randn(2, 5, 16).to(BF16),)),
    "BasedAttention": (lambda: tkq.nn.BasedAttention(16, num_heads=1, head_dim=32, dtype=BF16),
                       lambda: (torch.randn(2, 5, 16).to(BF16),)),
}


@pytest.mark.parametrize("name", TRACED)
def test_a_module_is_traced_whole(name):
    torch._dynamo.reset()
    module, inputs = TRACED[name][0](), TRACED[name][1]()
    found = torch.compile(module, fullgraph=True, backend="eager")(*inputs)
    torch.testing.assert_close(found, module(*inputs))


def test_no_call_imports_from_the_package_itself():
    """Which is a module of a class of its own: torch.compile of torch 2.11 does not follow `from . import`."""
    nodes = ast.walk(ast.parse(pathlib.Path(tkq.nn.__file__).read_text()))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    imports = [node for f in functions for node in ast.walk(f) if isinstance(node, ast.ImportFrom)]
    assert imports and all(node.module for node in imports)
