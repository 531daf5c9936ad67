"""model.generate of transformers with tkq's attention, by CPU references: caches that grow and static ones, whose masks
generate has made ahead of the model's call."""
import copy

import pytest
import torch
from torch._dynamo.utils import counters

transformers = pytest.importorskip("transformers", minversion="5.17", reason="transformers is not installed")

import tkq.integrations.transformers as tkq_transformers  # noqa: E402
from tests.cpu.integrations.test_transformers_cpu import LEFT, model, quiet, tokens, torchs  # noqa: E402, F401
from tkq.integrations.transformers_attention import padded  # noqa: E402

HOW = dict(max_new_tokens=6, do_sample=False, output_logits=True, return_dict_in_generate=True)
SOME = pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen3", "Gemma2"])
CACHES = pytest.mark.parametrize("cache", ["dynamic", "static"])
PADDED = pytest.mark.parametrize("keep", [torch.ones_like(LEFT), LEFT], ids=["whole", "padded"])
PATCHED = pytest.mark.parametrize("patched", [False, True], ids=["as it is", "patched"])


def generated(m, keep, **more):
    """(B, 12 + 6) tokens, (B, 6, vocabulary) logits."""
    out = m.generate(tokens().masked_fill(keep == 0, 0), attention_mask=keep, **HOW, **more)
    return out.sequences, torch.stack(out.logits, 1)


def other(m, attn):
    """The same model with another attention."""
    config = copy.deepcopy(m.config)
    config._attn_implementation = attn
    made = type(m)(config)
    made.load_state_dict(m.state_dict())
    return made


@SOME
@CACHES
@PADDED
@PATCHED
def test_in_16_bits(name, cache, keep, patched):
    """What tkq's attention takes: the logits of each step are the float32 model's for the tokens before it."""
    m = model(name, torch.bfloat16, "tkq")
    right = other(m, "eager")
    if patched:
        tkq_transformers.patch(m)
    ids, logits = generated(m, keep, cache_implementation=cache)
    whole = torch.nn.functional.pad(keep, (0, 5), value=1)
    places = (whole.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        want = right(ids[:, :-1], attention_mask=whole, position_ids=places).logits[:, 11:]
    error = (logits.float() - want).norm() / want.norm()
    assert error < 0.03, error


@SOME
@CACHES
@PADDED
@PATCHED
def test_in_float32(name, cache, keep, patched):
    """What goes to transformers' sdpa: the same tokens as from it, or from "eager"."""
    m = model(name, attn="tkq", **(dict(attn_logit_softcapping=None) if name == "Gemma2" else {}))
    right = other(m, torchs(name))
    if patched:
        tkq_transformers.patch(m)
    (ids, logits), (wanted, want) = (generated(x, keep, cache_implementation=cache) for x in (m, right))
    assert torch.equal(ids, wanted)
    torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name,graphs", [("Llama", 1), ("Gemma2", 2)])  # 2: a window that fills up, as with "sdpa"
def test_compiled_steps(name, graphs):
    """As generate does on a GPU: each token's call compiled, with the mask that was made outside."""
    m = model(name, torch.bfloat16, "tkq")
    tkq_transformers.patch(m)
    wanted, want = generated(m, LEFT, cache_implementation="static", disable_compile=True)
    torch._dynamo.reset()
    counters.clear()
    config = transformers.CompileConfig(backend="aot_eager", mode=None, fullgraph=True)
    config._compile_all_devices = True
    found, logits = generated(m, LEFT, cache_implementation="static", compile_config=config)
    assert counters["stats"]["unique_graphs"] == graphs, counters["stats"]
    assert torch.equal(found, wanted)
    torch.testing.assert_close(logits, want, rtol=3e-2, atol=3e-2)


def test_what_stands_for_a_mask():
    """What transformers asks a mask that it hands on, in whatever version."""
    layout = padded(LEFT.bool())
    assert layout.contiguous() is layout and layout.ndim == 4
