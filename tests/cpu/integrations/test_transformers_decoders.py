"""tkq.integrations.transformers on decoders with something of their own, against transformers without tkq: experts
beside tkq's modules, projections in one, norms in other places, multipliers, sinks, latent keys. By CPU references."""
import pickle

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.17", reason="transformers is not installed")

import tkq.integrations.transformers as tkq_transformers  # noqa: E402
from tests.helpers.decoder_models import MODELS, error, step, tokens  # noqa: E402
from tests.helpers.process.no_output import no_word  # noqa: E402
from tkq.integrations import transformers_modules as modules  # noqa: E402

BF16 = torch.bfloat16
NAMES = pytest.mark.parametrize("name", MODELS)
LEFT = torch.tensor([[0] * 3 + [1] * 9, [1] * 12])
CACHE = modules._CACHE


@pytest.fixture(autouse=True)
def quiet(capfd, caplog):
    with no_word(capfd, caplog):
        yield


def patched(name, dtype=BF16, attn="tkq", **more):
    m = MODELS[name].make(dtype, attn, **more)
    report = tkq_transformers.patch(m)
    assert (more or report.replaced == MODELS[name].report) and not report.left
    return m


@NAMES
def test_in_float32(name):
    """The same model: logits, loss, every gradient, parameters; and unpatched, to the bit, what it was."""
    m, ids = MODELS[name].make(), tokens()
    want, gradients = step(m, ids)
    logits, parameters = m.eval()(ids).logits, list(m.named_parameters())
    report = tkq_transformers.patch(m)
    assert report.replaced == MODELS[name].report and not report.left
    got, mine = step(m, ids)
    torch.testing.assert_close(got, want)
    assert mine.keys() == gradients.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(mine[key], gradient, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(m.eval()(ids).logits, logits, rtol=1e-4, atol=1e-5)
    assert all(a == c and b is d for (a, b), (c, d) in zip(m.named_parameters(), parameters, strict=True))
    tkq_transformers.unpatch(m)
    assert torch.equal(m(ids).logits, logits)


@pytest.mark.parametrize("patches", [False, True])
@NAMES
def test_under_autocast(name, patches):
    """Weights in float32: transformers' tables make queries and keys wider. Windows and padding hold all the same."""
    ids = tokens()
    right, peer = MODELS[name].make(attn="eager").eval(), MODELS[name].make(attn="eager").eval()
    m = MODELS[name].make(attn="tkq").eval()
    if patches:
        tkq_transformers.patch(m)
    for mask in (None, LEFT):
        with torch.no_grad():
            want = right(ids, attention_mask=mask).logits
            with torch.autocast("cpu", torch.bfloat16):
                low, mine = (x(ids, attention_mask=mask).logits.float() for x in (peer, m))
        keep = slice(None) if mask is None else mask.bool()
        assert (mine - want)[keep].norm() <= 1.5 * (low - want)[keep].norm() + 1e-3 * want[keep].norm()


def test_what_only_16_bits_have_is_refused():
    """A window that no mask tells of."""
    m = MODELS["Phi3"].make(attn="tkq_unmasked").eval()
    with pytest.raises(NotImplementedError, match="windows, padding"):
        m(tokens())


def test_norms_behind_a_convolution():
    """Whose results lie along time."""
    found = pytest.importorskip("transformers.models.gemma4.modeling_gemma4")
    config = transformers.models.gemma4.configuration_gemma4.Gemma4AudioConfig(hidden_size=64)
    module = found.Gemma4AudioLightConv1d(config).eval()
    x = torch.randn(2, 20, 64)
    want = module(x)
    tkq_transformers.patch(module)
    torch.testing.assert_close(module(x), want, rtol=1e-4, atol=1e-5)


@NAMES
def test_in_16_bits(name):
    """With tkq's attention and loss: as near to float32's loss and gradients as transformers' own in bf16."""
    ids = tokens()
    right, peer = step(MODELS[name].make(attn="eager"), ids), step(MODELS[name].make(BF16), ids)
    m = patched(name)
    mine = step(m, ids)
    assert m(ids, labels=ids).logits is None
    assert abs(mine[0] - right[0]) <= 2 * abs(peer[0] - right[0]) + 0.01
    assert error(mine[1], right[1]) <= 1.5 * error(peer[1], right[1])
    for key, wanted in right[1].items():
        assert error(mine[1][key], wanted) <= 3 * error(peer[1][key], wanted) + 0.05, key


@pytest.mark.parametrize("keep", [torch.ones_like(LEFT), LEFT], ids=["whole", "padded"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@NAMES
def test_generate(name, cache, keep, **more):
    """The logits of each step are the float32 model's for the tokens before it, as near as transformers' in bf16."""
    m, right, peer = patched(name, **more), MODELS[name].make(attn="eager", **more), MODELS[name].make(BF16, **more)
    out = m.eval().generate(tokens().masked_fill(keep == 0, 0), attention_mask=keep, max_new_tokens=4, do_sample=False,
                            output_logits=True, return_dict_in_generate=True, cache_implementation=cache)
    whole = torch.nn.functional.pad(keep, (0, 3), value=1)
    with torch.no_grad():
        want, theirs = (x.eval()(out.sequences[:, :-1], attention_mask=whole,
                                 position_ids=(whole.cumsum(1) - 1).clamp(min=0)).logits[:, 11:] for x in (right, peer))
    assert error(torch.stack(out.logits, 1), want) <= 1.5 * error(theirs, want) + 0.005


@NAMES
def test_a_cache_is_the_same_for_both(name):
    """What a patched model has written to a cache goes on in an unpatched one: the same numbers at the same places."""
    m, ids = MODELS[name].make().eval(), tokens()
    with torch.no_grad():
        want = m(ids).logits[:, 8:]
        tkq_transformers.patch(m)
        cache = getattr(m(ids[:, :8], use_cache=True), CACHE)
        tkq_transformers.unpatch(m)
        found = m(ids[:, 8:], use_cache=True, **{CACHE: cache}).logits
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


@NAMES
def test_packed_sequences(name):
    """Found by their positions, with a cache too: each as if it were alone, as near as transformers' own in bf16."""
    m, ids, cuts = patched(name).eval(), tokens(1), (5, 7)
    places = torch.cat([torch.arange(n) for n in cuts])[None]
    with torch.no_grad():
        want, theirs = (torch.cat([x(part, use_cache=False).logits for part in ids.split(cuts, 1)], 1)
                        for x in (MODELS[name].make(attn="eager").eval(), MODELS[name].make(BF16).eval()))
        for cached in (False, True):
            found = m(ids, position_ids=places, use_cache=cached).logits
            assert error(found, want) <= 1.5 * error(theirs, want) + 0.005
        assert error(m(ids).logits, want) > 0.05, "as one sequence it is another result"


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_with_other_heads_in_some_layers(cache):
    """Of Gemma 4 without layers that share keys: one head of 32 columns in the global ones, two of 16 in the others."""
    test_generate("Gemma4", cache, LEFT, num_kv_shared_layers=0, attention_k_eq_v=True)


def test_last_queries_alone():
    """Which Gemma 4 has in layers that share keys: logits of the last token are those of a whole call, with padding,
    too. Sequences packed in one row are refused there."""
    m, ids = patched("Gemma4").eval(), tokens()
    with torch.no_grad():
        for more in ({}, dict(attention_mask=LEFT)):
            want = m(ids, **more).logits[:, -1:]
            assert error(m(ids, logits_to_keep=1, **more).logits, want) < 0.02
        if not hasattr(m.model, "_maybe_slice_kv_shared_inputs"):
            return  # an earlier version, which computes all tokens
        places = torch.arange(12).expand(2, -1) % 6
        with pytest.raises(NotImplementedError, match="position_ids.*several sequences"):
            m(ids, position_ids=places, logits_to_keep=1)


@NAMES
def test_pickled(name):
    m, ids = patched(name).eval(), tokens()
    found = pickle.loads(pickle.dumps(m))
    assert [type(x) for x in found.modules()] == [type(x) for x in m.modules()]
    assert torch.equal(found(ids).logits, m(ids).logits)


@pytest.mark.parametrize("name", ["DeepseekV3", "Gemma4", "GptOss"])
def test_compiled(name):
    """In one graph, with gradients."""
    m, ids = patched(name, **(dict(first_k_dense_replace=2) if name == "DeepseekV3" else {})), tokens()
    want, gradients = step(m, ids)
    torch._dynamo.reset()
    compiled = torch.compile(m.train(), backend="aot_eager", fullgraph=True)
    m.zero_grad()
    loss = compiled(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    torch.testing.assert_close(loss.detach(), want, rtol=1e-2, atol=0)
    assert error({key: p.grad for key, p in m.named_parameters() if p.grad is not None}, gradients) < 0.03


# ---- what is left --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, more, left", [
    ("Granite", dict(logits_scaling=6.0), "GraniteForCausalLM: logits_scaling 6.0, no power of 2"),
    ("Olmo", dict(clip_qkv=1.0), "OlmoAttention: clip_qkv 1.0"),
    ("Phi3", dict(hidden_act="relu"), "Phi3MLP: activation ReLU"),
])
def test_left_and_reported(name, more, left):
    m, ids = MODELS[name].make(**more), tokens()
    want, gradients = step(m, ids)
    report = tkq_transformers.patch(m)
    assert list(report.left) == [left] and left.partition(":")[0] not in report.replaced
    got, mine = step(m, ids)
    torch.testing.assert_close(got, want)
    assert error(mine, gradients) < 1e-4


def test_dropouts_of_phi3_are_called():
    m, ids = MODELS["Phi3"].make(resid_pdrop=0.5), tokens()
    torch.manual_seed(5)
    want, _ = step(m, ids)
    tkq_transformers.patch(m)
    for seed, same in ((5, True), (6, False)):
        torch.manual_seed(seed)
        assert torch.isclose(step(m, ids)[0], want) == same


@pytest.mark.parametrize("name", ["Qwen3Moe", "GptOss"])
@pytest.mark.parametrize("by_config", [False, True])
def test_losses_of_routers(name, by_config):
    """Where they are asked for the loss is transformers' own, and the output has the routers' logits."""
    given = {} if by_config else dict(output_router_logits=True)
    m, ids = MODELS[name].make(BF16, output_router_logits=by_config).train(), tokens()
    want = m(ids, labels=ids, **given)
    tkq_transformers.patch(m)
    found = m(ids, labels=ids, **given)
    assert found.logits is not None and found.aux_loss is not None
    torch.testing.assert_close(found.loss, want.loss, rtol=2e-2, atol=0)
    assert m(ids, labels=ids, output_router_logits=False).logits is None


@pytest.mark.parametrize("name, more", [
    ("DeepseekV3", dict(q_lora_rank=None)),
    ("DeepseekV3", dict(rope_interleave=False)),
    ("Gemma4", dict(attention_k_eq_v=True)),
    ("Gemma4", dict(num_kv_shared_layers=0, attention_k_eq_v=True, hidden_size_per_layer_input=0)),
    ("Gemma4", dict(enable_moe_block=True, num_experts=2, top_k_experts=2, moe_intermediate_size=16)),
])
def test_other_configs(name, more):
    m, ids = MODELS[name].make(**more), tokens()
    want, gradients = step(m, ids)
    report = tkq_transformers.patch(m)
    assert not report.left and all(name + ending in report.replaced for ending in MODELS[name].replaced)
    got, mine = step(m, ids)
    torch.testing.assert_close(got, want)
    assert error(mine, gradients) < 1e-4


def test_heads_of_deepseek():
    """192 columns of queries and keys, 128 of values, as the model has them, by tkq's attention."""
    more = dict(num_hidden_layers=1, head_dim=64, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    right, ids = MODELS["DeepseekV3"].make(attn="eager", **more).eval(), tokens()
    m, peer = (MODELS["DeepseekV3"].make(BF16, attn, **more).eval() for attn in ("tkq", "sdpa"))
    tkq_transformers.patch(m)
    with torch.no_grad():
        want, found, theirs = (x(ids).logits for x in (right, m, peer))
    assert error(found, want) <= 1.5 * error(theirs, want)


@pytest.mark.parametrize("linear", ["tkq", "fp8"])
def test_linear_layers_of_latent_attention(linear):
    m, ids = MODELS["DeepseekV3"].make(BF16, "sdpa"), tokens()
    want = m.eval()(ids).logits
    report = tkq_transformers.patch(m, linear=linear)
    assert report.replaced["Linear"] + sum(report.left.values()) == 16
    assert error(m(ids).logits, want) < (0.03 if linear == "tkq" else 0.2)
