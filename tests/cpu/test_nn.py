"""tkq.nn beside torch.nn: results, gradients, state dicts and what they print."""
import copy

import pytest
import torch
from torch import nn

import tkq
import tkq.nn
from tests.rule import assert_2x

PAIRS = [(tkq.nn.RMSNorm, nn.RMSNorm), (tkq.nn.LayerNorm, nn.LayerNorm)]
ARGUMENTS = [dict(normalized_shape=48), dict(normalized_shape=(48,)), dict(normalized_shape=[3, 16]),
             dict(normalized_shape=(3, 4, 4), elementwise_affine=False), dict(normalized_shape=48, eps=1e-3)]


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
        with pytest.raises(ValueError, match=r"x: shape is .*normalized_shape"):
            module(normalized)(torch.ones(shape))


@pytest.fixture
def seen(monkeypatch):
    """What tkq.cross_entropy is called with: it is another package's, and has tests of its own."""
    calls = []

    def cross_entropy(logits, target, **options):
        calls.append((logits, target, options))
        return torch.zeros(())

    monkeypatch.setitem(vars(tkq), "cross_entropy", cross_entropy)
    return calls


def test_cross_entropy_passes_everything_on(seen):
    weight = torch.ones(7)
    module = tkq.nn.CrossEntropyLoss(weight, ignore_index=3, reduction="sum", label_smoothing=0.1, z_loss=1e-4,
                                     softcap=30.0, inplace_backward=True)
    assert list(module.state_dict()) == ["weight"] and isinstance(module, nn.CrossEntropyLoss)
    logits, target = torch.randn(5, 7), torch.zeros(5, dtype=torch.int64)
    module(logits, target)
    got, wanted, options = seen[0]
    assert got is logits and wanted is target and options.pop("weight") is module.weight
    assert options == dict(ignore_index=3, reduction="sum", label_smoothing=0.1, z_loss=1e-4, softcap=30.0,
                           inplace_backward=True)
    tkq.nn.CrossEntropyLoss()(logits, target)
    assert seen[1][2] == dict(weight=None, ignore_index=-100, reduction="mean", label_smoothing=0.0, z_loss=0.0,
                              softcap=None, inplace_backward=False)


def test_cross_entropy_brings_the_classes_last(seen):
    logits, target = torch.randn(2, 7, 3, 4), torch.zeros(2, 3, 4, dtype=torch.int64)
    tkq.nn.CrossEntropyLoss(reduction="none")(logits, target)
    assert seen[0][0].shape == (2, 3, 4, 7) and torch.equal(seen[0][0], logits.movedim(1, -1))
    assert seen[0][0].is_contiguous()


def test_cross_entropy_of_probabilities_is_refused(seen):
    with pytest.raises(NotImplementedError, match="target: got probabilities"):
        tkq.nn.CrossEntropyLoss()(torch.randn(5, 7), torch.rand(5, 7))
