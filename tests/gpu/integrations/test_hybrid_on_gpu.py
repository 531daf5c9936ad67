"""transformers' Qwen3-Next on tkq's kernels, from a config with random weights: training, generating, steps in a CUDA
graph."""
import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.17", reason="transformers is not installed")

import tkq.integrations.transformers as tkq_transformers  # noqa: E402
from tests.helpers.process.no_output import no_word  # noqa: E402
from tests.helpers.qwen3_next import REPLACED, by_kind, error, model, step, tokens  # noqa: E402
from tkq.integrations import transformers_hybrid as hybrid  # noqa: E402

SIZES = dict(hidden_size=256, head_dim=64, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=128,
             linear_value_head_dim=128, intermediate_size=256, moe_intermediate_size=64,
             shared_expert_intermediate_size=64)
CACHE = "cache" if "cache" in transformers.modeling_outputs.MoeCausalLMOutputWithPast.__dataclass_fields__ else (
    "past_key_values")


@pytest.fixture(autouse=True)
def quiet(capfd, caplog):
    with no_word(capfd, caplog):
        yield


@pytest.fixture
def calls(monkeypatch):
    """How many tokens the rule was called with by mixers; or "step"."""
    seen, rule, one = [], hybrid.gated_delta_rule, hybrid.gated_delta_rule_step
    monkeypatch.setattr(hybrid, "gated_delta_rule",
                        lambda q, *given, **options: (seen.append(q.shape[1]), rule(q, *given, **options))[1])
    monkeypatch.setattr(hybrid, "gated_delta_rule_step", lambda *given: (seen.append("step"), one(*given))[1])
    return seen


def make(dtype=torch.bfloat16, attn="tkq", patched=False):
    m = model(dtype, attn, "cuda", **SIZES)
    if patched:
        report = tkq_transformers.patch(m)
        assert report.replaced == REPLACED and not report.left
    return m


def test_a_step(calls):
    """As near to float32's as transformers' own mixers, in float32, are; together, and each kind of parameter, of all
    layers, within a few times: a layer's dt_bias, four sums of small differences, is off by 2 to 50 % as the tokens
    have it, with transformers' mixers as with exact ones."""
    ids = tokens(S=200, device="cuda")
    right, peer, mine = (step(m, ids) for m in (make(torch.float32, "sdpa"), make(attn="sdpa"), make(patched=True)))
    assert calls == [200] * 4
    assert abs(mine[0] - right[0]) <= 1.5 * abs(peer[0] - right[0]) + 2e-3
    assert error(mine[1], right[1]) <= 1.3 * error(peer[1], right[1]) + 1e-3
    theirs, ours = by_kind(peer[1]), by_kind(mine[1])
    for kind, wanted in by_kind(right[1]).items():
        assert error(ours[kind], wanted) <= 3 * error(theirs[kind], wanted) + 0.03, kind


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("cache", ["dynamic", "static", pytest.param("compiled", marks=pytest.mark.slow)])
def test_generate(cache, padded, calls):
    """The logits of each step are those of the whole sequence: by the same model, and in 32 bits."""
    m, right, ids = make(patched=True).eval(), make(torch.float32, "sdpa").eval(), tokens(S=70, device="cuda")
    keep = torch.ones_like(ids)
    keep[0, :10] = 0 if padded else 1
    torch._dynamo.reset()
    out = m.generate(ids.masked_fill(keep == 0, 0), attention_mask=keep, max_new_tokens=8, do_sample=False,
                     output_logits=True, return_dict_in_generate=True,
                     cache_implementation="dynamic" if cache == "dynamic" else "static",
                     disable_compile=cache != "compiled")
    assert calls[:4] == [70] * 4
    assert set(calls[4:]) == {"step"} or cache == "compiled"  # whose calls are traced
    keep = torch.nn.functional.pad(keep, (0, 7), value=1)
    with torch.no_grad():
        whole, exact = (other(out.sequences[:, :-1], attention_mask=keep,
                              position_ids=(keep.cumsum(1) - 1).clamp(min=0), use_cache=False).logits[:, 69:]
                        for other in (m, right))
    found = torch.stack(out.logits, 1)
    assert error(found, exact) < 0.06 and error(whole, exact) < 0.06
    assert error(found, whole) < 2 * error(whole, exact)  # both are rounded to 16 bits, each in its own way


def test_a_prompt_in_parts(calls):
    m, ids = make(patched=True).eval(), tokens(S=200, device="cuda")
    with torch.no_grad():
        want = m(ids, use_cache=False).logits
        del calls[:]
        cache, found = transformers.DynamicCache(config=m.config), []
        for part in ids.tensor_split((64, 65, 140), 1):
            found.append(m(part, use_cache=True, **{CACHE: cache}).logits)
    assert calls == [64] * 4 + ["step"] * 4 + [75] * 4 + [60] * 4
    assert error(torch.cat(found, 1), want) < 0.02


def test_a_step_of_the_rule_in_a_graph():
    """A mixer's step on a cache that stays where it is, replayed, gives what the call gives."""
    m, x = make(patched=True).eval(), torch.randn(2, 24, 256, device="cuda", dtype=torch.bfloat16)
    mixer, name = m.model.layers[0].linear_attn, hybrid.cache_argument(m.model.layers[0].linear_attn)
    with torch.no_grad():
        want = mixer(x)
        cache = transformers.DynamicCache(config=m.config)
        mixer(x[:, :20], **{name: cache})
        layer = cache.layers[0]
        states = layer.conv_states[0], layer.recurrent_states[0]
        before = [t.clone() for t in states]
        one = x[:, 20:21].clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            mixer(one, **{name: cache})
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = mixer(one, **{name: cache})
        assert all(a is b for a, b in zip(states, (layer.conv_states[0], layer.recurrent_states[0])))
        for t, old in zip(states, before):
            t.copy_(old)
        for i in range(20, 24):
            one.copy_(x[:, i:i + 1])
            graph.replay()
            assert error(out, want[:, i:i + 1]) < 0.02, i
