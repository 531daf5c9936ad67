"""tkq.integrations.transformers on models of a few thousand parameters, without a GPU: by tkq's CPU references."""
import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers", minversion="5.17", reason="transformers is not installed")

from transformers import DynamicCache, StaticCache  # noqa: E402
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask  # noqa: E402

import tkq.integrations.transformers as tkq_transformers  # noqa: E402
from tests.helpers.process.no_output import no_word  # noqa: E402
from tkq.integrations import transformers_attention as attention  # noqa: E402
from tkq.integrations import transformers_modules as modules  # noqa: E402

BASE = dict(vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, max_position_embeddings=64, pad_token_id=0)
MORE = {
    "Llama": {}, "Mistral": dict(sliding_window=5), "Qwen2": dict(use_sliding_window=True, sliding_window=5,
                                                                 max_window_layers=1),
    "Qwen3": {}, "Gemma2": dict(sliding_window=5, query_pre_attn_scalar=16),
    "Gemma3": dict(sliding_window=5, query_pre_attn_scalar=16),
}
NORMS = {"Llama": 5, "Mistral": 5, "Qwen2": 5, "Qwen3": 9, "Gemma2": 9, "Gemma3": 13}


@pytest.fixture(autouse=True)
def quiet(capfd, caplog):
    with no_word(capfd, caplog):
        yield


def torchs(name):
    """"sdpa", or "eager" of a model that this version of transformers has without it."""
    return "sdpa" if getattr(transformers, f"{name}ForCausalLM")._supports_sdpa else "eager"


def model(name, dtype=torch.float32, attn=None, **more):
    suffix = "TextConfig" if name == "Gemma3" else "Config"
    config = getattr(transformers, name + suffix)(**{**BASE, **MORE[name], **more})
    config._attn_implementation = attn or torchs(name)
    torch.manual_seed(0)
    made = getattr(transformers, f"{name}ForCausalLM")(config).to(dtype)
    for p in made.parameters():  # norms' weights too
        p.data.add_(torch.randn_like(p) * 0.1)
    return made


def tokens(B=2, S=12):
    return torch.randint(1, 96, (B, S), generator=torch.Generator().manual_seed(1))


def loss_and_gradients(m, labels, **more):
    m.zero_grad()
    loss = m(input_ids=labels, labels=labels, use_cache=False, **more).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in m.named_parameters()}


@pytest.mark.parametrize("name", MORE)
def test_a_step_without_masks_waits_for_no_number(name):
    """On a GPU the host would stand still there."""
    class Asked(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert func is not torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    one, other = (model(name, torch.bfloat16, attn=attn).train() for attn in ("tkq", "tkq_unmasked"))
    tkq_transformers.patch(one, linear="tkq"), tkq_transformers.patch(other, linear="tkq")
    (wanted, gradients), (found, others) = (loss_and_gradients(m, tokens()) for m in (one, other))
    assert torch.equal(found, wanted) and all(torch.equal(x, others[key]) for key, x in gradients.items())
    with Asked():
        loss_and_gradients(other, tokens())
    with Asked(), pytest.raises(AssertionError):
        loss_and_gradients(one, tokens())  # else nothing would be looked for here


ROWS = torch.arange(12).expand(2, -1)


@pytest.mark.parametrize("given", [dict(attention_mask=torch.ones(2, 12, dtype=torch.long)),
                                   dict(position_ids=ROWS[:1]), dict(position_ids=ROWS)])
@pytest.mark.parametrize("train", [True, False])
def test_unmasked_refuses_what_needs_a_mask(given, train):
    m, ids = model("Llama", torch.bfloat16, attn="tkq_unmasked").train(train), tokens()
    tkq_transformers.patch(m)
    with pytest.raises(NotImplementedError, match="tkq_unmasked.*got (attention_mask|position_ids)"):
        m(input_ids=ids, labels=ids, **given)
    m.set_attn_implementation("tkq")
    assert m(input_ids=ids, labels=ids, **given).loss.isfinite()


def test_layers_of_unmasked_refuse_what_they_see():
    m, ids = model("Llama", torch.bfloat16, attn="tkq_unmasked"), tokens()
    with pytest.raises(NotImplementedError, match="position_ids"):
        m(ids, position_ids=ROWS)
    with pytest.raises(NotImplementedError, match="a cache or chunks"):
        m(ids, past_key_values=StaticCache(m.config, max_cache_len=20))
    out = m(ids, use_cache=True)  # a cache that is empty before
    with pytest.raises(NotImplementedError, match="a cache or chunks"):
        m(ids[:, :1], past_key_values=out.past_key_values)
    m.config.attention_chunk_size = 4
    with pytest.raises(NotImplementedError, match="a cache or chunks"):
        m(ids, use_cache=False)


def test_unmasked_takes_sequences_that_are_named():
    m, ids, places = model("Llama", torch.bfloat16, attn="tkq_unmasked"), tokens(1), torch.arange(12)[None] % 6
    cu = torch.tensor([0, 6, 12], dtype=torch.int32)
    named = dict(cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=6, max_length_k=6)
    tkq_transformers.patch(m)
    found = m(ids, position_ids=places, **named).logits
    m.set_attn_implementation("tkq")
    assert torch.equal(found, m(ids, position_ids=places, use_cache=False).logits)


@pytest.mark.parametrize("name", MORE)
def test_patched_is_the_same_model(name):
    attn = "eager" if name == "Gemma2" else "sdpa"  # softcap
    m, ids = model(name, attn=attn), tokens()
    before = {key: value.clone() for key, value in m.state_dict().items()}
    parameters = list(m.parameters())
    want, gradients = loss_and_gradients(m, ids)
    logits = m.eval()(ids).logits
    report = tkq_transformers.patch(m)
    assert report.replaced == {f"{name}RMSNorm": NORMS[name], f"{name}MLP": 2, f"{name}Attention": 2,
                               f"{name}DecoderLayer": 2, f"{name}ForCausalLM": 1}
    assert not report.left
    torch.testing.assert_close(m(ids).logits, logits, rtol=1e-4, atol=1e-5)
    got, mine = loss_and_gradients(m.train(), ids)
    torch.testing.assert_close(got, want)
    for key, gradient in gradients.items():
        torch.testing.assert_close(mine[key], gradient, rtol=1e-3, atol=1e-5)
    after = m.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[key], before[key]) for key in before)
    assert all(a is b for a, b in zip(m.parameters(), parameters))
    assert isinstance(m, getattr(transformers, f"{name}ForCausalLM"))
    assert not tkq_transformers.patch(m).replaced  # once is enough
    tkq_transformers.unpatch(m)
    assert type(m) is getattr(transformers, f"{name}ForCausalLM")
    torch.testing.assert_close(m.eval()(ids).logits, logits, rtol=0, atol=0)


def test_the_loss_without_logits():
    """In bf16, where linear_cross_entropy takes it: the usual loss of the same hidden states."""
    m, ids = model("Llama", torch.bfloat16, "tkq"), tokens()
    tkq_transformers.patch(m)
    labels = ids.clone()
    labels[:, :3] = -100
    wide = m.eval()(ids).logits.float()
    whole = torch.nn.functional.cross_entropy(wide[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    count = (labels[:, 1:] != -100).sum()
    m.train()
    out = m(ids, labels=labels, use_cache=False)
    assert out.logits is None
    torch.testing.assert_close(out.loss, whole / count, rtol=1e-2, atol=0)
    by_five = m(ids, labels=labels, num_items_in_batch=torch.tensor(5)).loss
    torch.testing.assert_close(by_five, whole / 5, rtol=1e-2, atol=0)
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    torch.testing.assert_close(m(ids, labels=labels, shift_labels=shifted).loss, out.loss)
    assert m(ids, labels=labels, return_dict=False)[0].shape == ()
    assert m.eval()(ids, labels=labels).logits is not None
    assert m.train()(ids).loss is None
    tkq_transformers.unpatch(m)
    tkq_transformers.patch(m, loss=False)
    assert m(ids, labels=labels).logits is not None


def test_with_checkpoints():
    """Activations computed anew in the backward: the same gradients."""
    m, ids = model("Llama", attn="tkq"), tokens()
    tkq_transformers.patch(m)
    want = loss_and_gradients(m, ids)
    m.gradient_checkpointing_enable(dict(use_reentrant=False))
    got = loss_and_gradients(m, ids)
    assert torch.equal(got[0], want[0]) and all(torch.equal(got[1][key], g) for key, g in want[1].items())


def test_what_is_not_known_is_left():
    m = model("Llama", hidden_act="relu")
    report = tkq_transformers.patch(m)
    assert "LlamaMLP" not in report.replaced and report.replaced["LlamaAttention"] == 2
    assert report.left == {"LlamaMLP: activation ReLU": 2} and "activation ReLU" in str(report)
    other = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.RMSNorm(4))
    assert not tkq_transformers.patch(other).replaced and "nothing" in str(tkq_transformers.patch(other))
    with pytest.raises(ValueError, match="linear.*'fp4'"):
        tkq_transformers.patch(other, linear="fp4")


@pytest.mark.parametrize("linear", ["tkq", "fp8", "fp8_block", "fp8_tensor"])
def test_linear_layers(linear):
    from tkq import nn as tkq_nn

    m, ids = model("Llama", torch.bfloat16), tokens()
    keys, wanted = list(m.state_dict()), m(ids).logits
    report = tkq_transformers.patch(m, linear=linear)
    base = tkq_nn.Linear if linear == "tkq" else tkq_nn.Fp8Linear
    assert report.replaced["Linear"] == 14 and isinstance(m.model.layers[0].mlp.up_proj, base)
    assert type(m.lm_head) is torch.nn.Linear and list(m.state_dict()) == keys
    found = m(ids).logits
    assert (found - wanted).norm() / wanted.norm() < (0.02 if linear == "tkq" else 0.15)
    loss_and_gradients(m.train(), ids)
    tkq_transformers.unpatch(m)
    assert type(m.model.layers[0].mlp.up_proj) is torch.nn.Linear
    assert not hasattr(m.model.layers[0].mlp.up_proj, "recipe")


@pytest.mark.parametrize("linear", ["fp8", "fp8_block", "fp8_tensor"])
def test_weights_that_are_not_kept(linear):
    """keep_weight=False, for sharded weights: the same losses and gradients."""
    ids, found = tokens(), []
    for keep in (True, False):
        m = model("Llama", torch.bfloat16).train()
        tkq_transformers.patch(m, linear=linear, keep_weight=keep)
        assert m.model.layers[0].self_attn.q_proj.recipe.keep_weight is keep
        found.append(loss_and_gradients(m, ids))
    (loss, gradients), (wanted, others) = found
    assert torch.equal(loss, wanted) and all(torch.equal(gradients[key], g) for key, g in others.items())


@pytest.mark.parametrize("linear", [None, "tkq"])
def test_weights_that_are_not_kept_are_of_float8_layers(linear):
    with pytest.raises(ValueError, match="keep_weight=False is for layers in float8"):
        tkq_transformers.patch(model("Llama"), linear=linear, keep_weight=False)
    with pytest.raises(TypeError, match="patch: keep_weight: got 1"):
        tkq_transformers.patch(model("Llama"), linear=linear, keep_weight=1)


# ---- attention: its masks -------------------------------------------------------------------------------------------


def of_mask(m, mask, B=2, S=12, H=4, Hk=2, D=16, keys=None, window=None):
    """(attention by the layout that tkq makes, by transformers' 4-D mask, in float32)"""
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(B, h, n, D, generator=g) for h, n in ((H, S), (Hk, keys or S), (Hk, keys or S)))
    layer = m.model.layers[0].self_attn
    o, _ = attention.attention_forward(layer, *(x.bfloat16() for x in (q, k, v)), mask[0], D**-0.5,
                                       sliding_window=window)
    q, k, v = (x.bfloat16().float() for x in (q, k, v))
    right = torch.nn.functional.scaled_dot_product_attention(
        q, *(x.repeat_interleave(H // Hk, 1) for x in (k, v)), attn_mask=mask[1])
    return o.float(), right.transpose(1, 2)


def masks(m, S=12, make=create_causal_mask, **more):
    """Of one situation, by tkq and by sdpa, as a tensor always."""
    found = []
    for kind, skip in (("tkq", True), ("sdpa", False)):
        config = copy.copy(m.config)
        config._attn_implementation = kind
        given = dict(attention_mask=None, past_key_values=None, position_ids=torch.arange(S)[None])
        found.append(make(config, torch.zeros(2, S, 64, dtype=torch.bfloat16), **{**given, **more},
                          **({} if make is not create_causal_mask else {"allow_is_causal_skip": skip})))
    if found[1] is None:
        found[1] = torch.ones(S, S, dtype=torch.bool).tril()
    return found


def close(got, want, where=None):
    where = slice(None) if where is None else where
    torch.testing.assert_close(got[where], want[where], rtol=2e-2, atol=2e-2)


LEFT = torch.tensor([[0] * 3 + [1] * 9, [1] * 12])
RIGHT = LEFT.flip(1)
HOLES = torch.tensor([[1, 0] * 6, [0] * 5 + [1] * 4 + [0] * 3])


@pytest.mark.parametrize("keep", [LEFT, RIGHT, HOLES])
def test_padding_becomes_sequences(keep):
    m = model("Llama")
    found = masks(m, attention_mask=keep)
    assert found[0].cu.tolist() == [0, int(keep[0].sum()), int(keep.sum())] and found[0].cu.dtype == torch.int32
    close(*of_mask(m, found), where=keep.bool())
    o, _ = of_mask(m, found)
    assert not o[~keep.bool()].any()  # what is padded sees nothing


def test_no_padding_is_no_mask():
    m = model("Llama")
    assert masks(m)[0] is None and masks(m, attention_mask=torch.ones(2, 12, dtype=torch.long))[0] is None
    close(*of_mask(m, masks(m)))


def test_windows():
    m = model("Mistral")
    for keep in (None, LEFT, HOLES):
        found = masks(m, make=create_sliding_window_causal_mask, attention_mask=keep)
        assert isinstance(found[0], torch.Tensor) == (keep is HOLES)
        close(*of_mask(m, found, window=5), where=None if keep is None else keep.bool())


def test_packed_sequences():
    m = model("Llama")
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5, 0, 0, 1], list(range(12))])
    found = masks(m, position_ids=positions)
    assert found[0].cu.tolist() == [0, 3, 9, 10, 12, 24]
    close(*of_mask(m, found))
    given = attention.attention_forward  # where a caller says it
    q = torch.randn(1, 4, 12, 16).bfloat16()
    k = torch.randn(1, 2, 12, 16).bfloat16()
    layer, cu = m.model.layers[0].self_attn, torch.tensor([0, 3, 9, 10, 12])
    a = given(layer, q, k, k, None, 0.25, cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=6, max_length_k=6)[0]
    b = given(layer, q, k, k, attention.Layout(cu=cu.int()), 0.25)[0]
    assert torch.equal(a, b)


@pytest.mark.parametrize("keep", [None, LEFT])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma2"])
def test_a_cache(name, static, keep):
    """Token by token and with a cache: the same as all at once, by eager attention in float32."""
    m = model(name, torch.bfloat16, "tkq", tie_word_embeddings=False)
    ids = tokens()
    with torch.no_grad():
        config = copy.deepcopy(m.config)
        config._attn_implementation = "eager"
        right = type(m)(config)
        right.load_state_dict(m.state_dict())
        positions = None if keep is None else (keep.cumsum(1) - 1).clamp(min=0)
        want = right(ids, attention_mask=keep, position_ids=positions).logits
        cache = StaticCache(m.config, max_cache_len=20) if static else DynamicCache(config=m.config)
        found = []
        for a, b in ((0, 7), (7, 8), (8, 9), (9, 12)):
            found.append(m(ids[:, a:b], attention_mask=None if keep is None else keep[:, :b], past_key_values=cache,
                           position_ids=None if keep is None else positions[:, a:b]).logits)
    attended = slice(None) if keep is None else keep.bool()
    error = (torch.cat(found, 1)[attended].float() - want[attended]).norm() / want[attended].norm()
    assert error < 0.03, error


def test_other_masks_go_to_sdpa():
    m = model("Llama")
    odd = masks(m, and_mask_function=lambda b, h, q, k: (q - k) % 2 == 0)
    assert isinstance(odd[0], torch.Tensor) and torch.equal(odd[0], odd[1])
    close(*of_mask(m, odd))
    wide = attention.make_mask(2, 12, 12, attention_mask=LEFT.bool(), dtype=torch.float32)
    assert isinstance(wide, torch.Tensor)  # float32 is none of ours
    layer, q = m.model.layers[0].self_attn, torch.randn(2, 4, 12, 16).bfloat16()
    with pytest.raises(NotImplementedError, match="softcap"):
        attention.attention_forward(layer, q, q[:, :2], q[:, :2], wide, 0.25, softcap=30.0)
    with pytest.raises(NotImplementedError, match="dropout"):
        attention.attention_forward(layer, q, q[:, :2], q[:, :2], None, 0.25, dropout=0.1)


def test_each_known_class_is_there():
    """The table names what this version of transformers has: nothing in it is misspelt."""
    assert len(modules.known()) == sum(len(modules.kinds_of(family)) for family in modules.FAMILIES.values())


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("keep, op", [(None, "flash_attn"), (LEFT, "flash_attn_varlen")])
def test_exported_with_a_length_that_stays_free(strict, keep, op):
    """Sizes are symbols then: they are known all the same, and a program is as fast as the call."""
    m = model("Llama", torch.bfloat16, "tkq", num_hidden_layers=1).eval()

    def call(ids, keep):
        return m(input_ids=ids, attention_mask=keep, use_cache=False).logits

    module = torch.nn.Module()
    module.m, module.forward = m, call
    free = {1: torch.export.Dim.AUTO}
    program = torch.export.export(module, (tokens(), keep), dynamic_shapes=(free, None if keep is None else free),
                                  strict=strict)
    assert {str(node.target) for node in program.graph.nodes if "tkq" in str(node.target)} == {f"tkq.{op}.default"}
    ids = tokens(S=19)
    keep = None if keep is None else torch.nn.functional.pad(keep, (0, 7), value=1)
    attended = slice(None) if keep is None else keep.bool()
    assert torch.equal(program.module()(ids, keep)[attended], call(ids, keep)[attended])


def test_compiled():
    """In one graph, padded or not, and with a gradient."""
    m, ids = model("Llama", torch.bfloat16, "tkq", num_hidden_layers=1), tokens()
    tkq_transformers.patch(m)
    want, gradients = loss_and_gradients(m, ids)
    torch._dynamo.reset()
    compiled = torch.compile(m, backend="aot_eager", fullgraph=True)
    got, mine = loss_and_gradients(compiled, ids)
    torch.testing.assert_close(got, want, rtol=1e-2, atol=0)
    for a, b in zip(mine.values(), gradients.values()):
        assert (a - b).norm() <= 0.03 * b.norm()
    logits = m.eval()(ids, attention_mask=HOLES).logits[HOLES.bool()]
    torch.testing.assert_close(compiled(ids, attention_mask=HOLES).logits[HOLES.bool()], logits, rtol=3e-2, atol=3e-2)
