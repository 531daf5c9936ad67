"""What models ask for together (tkq.attention.forward.catalog.MODELS): forward and backward, dense and packed
sequences."""
import pytest
import torch

from tests.helpers.attention import gradients, inputs, varlen_inputs
from tests.helpers.attention.varlen_gradients import MIXED, Problem
from tkq.attention.arguments import Options
from tkq.attention.forward.catalog import MODELS

HEADS = {"llama": (8, 2), "mistral": (8, 2), "gemma 2": (4, 2), "gpt-oss": (16, 2), "deepseek": (4, 4),
         "phi-3": (4, 4)}  # of q, of k and v
LEFT = {"near": 127, "long_window": 600, None: -1}
SINKS = {"bf16": torch.bfloat16, "fp32": torch.float32}
LAYERS = [(name, left) for name, model in MODELS.items() for left in dict.fromkeys((None, model.left))]
LENGTHS = (*MIXED, (1300, 1300), (800, 1100))


def everyday(name, left):
    """Of models with a window, the layers that have it: those without differ by what other tests have by itself.
    Phi-3's are those of `test_head_dim_96`, Gemma 2's of test_transformers_on_gpu.py."""
    return name not in ("phi-3", "gemma 2") and (left is not None or MODELS[name].left is None)


def options_of(name, left):
    """As Options has them, with sinks."""
    model, heads = MODELS[name], HEADS[name][0]
    sinks = torch.randn(heads, device="cuda").to(SINKS[model.sinks]) if model.sinks else None
    return dict(causal=True, left=LEFT[left], softcap=50.0 * model.softcap, sinks=sinks)


@pytest.mark.parametrize("name, left", LAYERS)
@pytest.mark.sampled(when=everyday)
def test_forward(name, left):
    dim, dim_v = MODELS[name].dims
    for rows, keys in ((1024, 1023), (641, 641), (300, 900), (500, 777), (800, 3)):
        x = inputs.make(2, rows, keys, *HEADS[name], dim, dim_v=dim_v)
        inputs.compare(*x, f"{rows} x {keys}", **options_of(name, left))
    x = varlen_inputs.make(LENGTHS, *HEADS[name], dim, spare=9, dim_v=dim_v)
    varlen_inputs.compare(*x, "packed", **options_of(name, left))


@pytest.mark.parametrize("name, left", LAYERS)
@pytest.mark.sampled(when=everyday)
def test_gradients(name, left):
    dim, dim_v = MODELS[name].dims
    options = options_of(name, left)
    causal, left, softcap, sinks = options.values()
    for rows, keys in ((1024, 1023), (641, 641), (300, 900)):
        x = gradients.make(2, rows, keys, *HEADS[name], dim, torch.bfloat16, dim_v=dim_v)
        gradients.compare(*x, causal, what=f"{rows} x {keys} {options}", window_size=(left, -1),
                                    softcap=softcap, sinks=sinks)
    sinks = None if sinks is None else sinks.dtype
    problem = Problem(LENGTHS, *HEADS[name], dim, dim_v=dim_v, spare=9, sinks=sinks,
                      options=Options(causal, None, left, -1, softcap))
    problem.judge(f"packed {options}")


@pytest.mark.parametrize("options", (*(
    pytest.param(dict(causal=True, **more), marks=pytest.mark.slow) for more in (dict(softcap=20.0), dict(sinks=True))),
    dict(left=600, right=0, sinks=True)), ids=str)
def test_head_dim_96(options):
    """As of Phi-3's widths, with what other models have."""
    sinks = torch.randn(4, device="cuda") if options.get("sinks") else None
    for rows, keys in ((641, 641), (1023, 1024), (300, 100)):
        x = inputs.make(2, rows, keys, 4, 2, 96)
        inputs.compare(*x, f"{rows} x {keys}", **{**options, "sinks": sinks})


@pytest.mark.parametrize("dims, heads, causal", (((256, 256), (8, 2), True), *(
    pytest.param(*each, marks=pytest.mark.slow) for each in (((64, 64), (16, 2), True), ((192, 128), (4, 2), False)))))
def test_packed_heads(dims, heads, causal):
    """Few queries of several heads in one tile, of other head dims than 128."""
    for rows, keys in ((1, 1), (1, 900), (2, 300), (15, 16), (33, 500)):
        x = inputs.make(3, rows, keys, *heads, dims[0], dim_v=dims[1])
        inputs.compare(*x, f"{rows} x {keys}", causal=causal)


def test_head_dim_192_of_packed_sequences():
    x = varlen_inputs.make(MIXED, 4, 2, 192, spare=9)
    varlen_inputs.compare(*x, "192 and 192", causal=True)
    Problem(MIXED, 4, 2, 192, spare=9, options=Options(True)).judge("192 and 192")


@pytest.mark.parametrize("dim", (64, pytest.param(256, marks=pytest.mark.slow)))
def test_packed_sequences_without_a_mask(dim):
    varlen_inputs.compare(*varlen_inputs.make(MIXED, 4, 2, dim, spare=9), "full")
    Problem(MIXED, 4, 2, dim, spare=9).judge("full")


@pytest.mark.slow
def test_a_limit_on_the_left_alone_of_packed_sequences():
    varlen_inputs.compare(*varlen_inputs.make(MIXED, 4, 2, 128), "left", left=100)
    Problem(MIXED, 4, 2, 128, options=Options(False, None, 100)).judge("left")


@pytest.mark.slow
def test_softcap_of_packed_sequences():
    varlen_inputs.compare(*varlen_inputs.make(MIXED, 4, 2, 128), "softcap", causal=True, softcap=20.0)
    Problem(MIXED, 4, 2, 128, options=Options(True, softcap=20.0)).judge("softcap")
