"""transformers' Kimi Linear, Mamba-2, Bamba, Granite 4 and Nemotron-H on tkq's kernels, from configs with random
weights: at most twice as far from float32 as the unpatched model of 16 bits is."""
import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.17", reason="transformers is not installed")

import tkq.integrations.transformers as tkq_transformers  # noqa: E402
from tests.helpers.hybrid_models import MODELS, assert_as_near, make, mixers, outcome, tokens  # noqa: E402
from tests.helpers.qwen3_next import error  # noqa: E402
from tkq.integrations import transformers_hybrid as hybrid  # noqa: E402

BF16 = torch.bfloat16
EACH = pytest.mark.parametrize("name", MODELS)
# of other tests' kernels
SIZES = {"KimiLinear": dict(linear_head_dim=64), "Mamba2": dict(hidden_size=128, head_dim=64, state_size=64),
         "Bamba": dict(hidden_size=128, mamba_d_head=64, mamba_d_state=64),
         "GraniteMoeHybrid": dict(hidden_size=128, mamba_d_head=64, mamba_d_state=64),
         "NemotronH": dict(mamba_head_dim=64, ssm_state_size=64)}


def model(name, dtype=BF16, patched=False):
    m = make(MODELS[name], dtype, device="cuda", **SIZES[name])
    if patched:
        report = tkq_transformers.patch(m)
        assert report.replaced == MODELS[name].replaces and not report.left
    return m


@EACH
def test_a_step(name):
    batches = [tokens(S=200, device="cuda", seed=seed) for seed in range(3)]
    right, peer, mine = ([outcome(m, ids) for ids in batches]
                         for m in (model(name, torch.float32), model(name), model(name, patched=True)))
    assert_as_near(mine, peer, right)


@EACH
def test_generate(name):
    """With padding, with the model's own cache: the logits of each step are the model's for the tokens before it."""
    m, ids = model(name, patched=True).eval(), tokens(S=70, device="cuda")
    keep = torch.ones_like(ids)
    keep[0, :10] = 0
    out = m.generate(ids.masked_fill(keep == 0, 0), attention_mask=keep, max_new_tokens=8, do_sample=False,
                     output_logits=True, return_dict_in_generate=True, eos_token_id=-1)
    keep = torch.nn.functional.pad(keep, (0, 7), value=1)
    with torch.no_grad():
        right, peer = (model(name, dtype).eval()(out.sequences[:, :-1], attention_mask=keep, use_cache=False).logits
                       for dtype in (torch.float32, BF16))
    assert error(torch.stack(out.logits, 1), right[:, 69:]) <= 2 * error(peer[:, 69:], right[:, 69:])


@pytest.mark.parametrize("name", ["KimiLinear", "Mamba2"])
def test_a_step_of_a_mixer_in_a_graph(name):
    """On a cache that stays where it is, replayed: what the call gives."""
    m = model(name, patched=True).eval()
    x = torch.randn(2, 24, m.config.hidden_size, device="cuda", dtype=BF16)
    mixer = mixers(MODELS[name], m)[0]
    given = hybrid.cache_argument(type(mixer))
    with torch.no_grad():
        right, peer = (mixers(MODELS[name], model(name, dtype).eval())[0](x.to(dtype))[:, 20:]
                       for dtype in (torch.float32, BF16))
        cache = transformers.DynamicCache(config=m.config)
        mixer(x[:, :20], **{given: cache})
        states = cache.layers[0].conv_states[0], cache.layers[0].recurrent_states[0]
        before, one = [t.clone() for t in states], x[:, 20:21].clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            mixer(one, **{given: cache})
        torch.cuda.current_stream().wait_stream(stream)
        graph, found = torch.cuda.CUDAGraph(), []
        with torch.cuda.graph(graph):
            out = mixer(one, **{given: cache})
        assert all(a is b for a, b in zip(states, (cache.layers[0].conv_states[0],
                                                   cache.layers[0].recurrent_states[0])))
        for t, old in zip(states, before):
            t.copy_(old)
        for i in range(20, 24):
            one.copy_(x[:, i:i + 1])
            graph.replay()
            found.append(out.clone())
    assert error(torch.cat(found, 1), right) <= 2 * error(peer, right)
