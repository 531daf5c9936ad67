"""tkq.integrations.transformers.patch on Qwen3-Next, of a few thousand parameters, by tkq's CPU references."""
import copy
import itertools
import pickle

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.17", reason="transformers is not installed")

import tkq.integrations.transformers as tkq_transformers  # noqa: E402
from tests.helpers.process.no_output import no_word  # noqa: E402
from tests.helpers.qwen3_next import REPLACED, error, model, step, tokens  # noqa: E402
from tkq.integrations import transformers_hybrid as hybrid  # noqa: E402

BF16 = torch.bfloat16
LEFT = torch.ones(2, 70, dtype=torch.long)
LEFT[0, :20] = 0


@pytest.fixture(autouse=True)
def quiet(capfd, caplog):
    with no_word(capfd, caplog):
        yield


@pytest.fixture
def calls(monkeypatch):
    """How often the rule was called by mixers, with how many tokens, and whether with a state; or "step"."""
    seen = []

    def stepped(*given):
        seen.append("step")
        return step(*given)

    def counted(q, *given, **options):
        seen.append((q.shape[1], given[5] is not None))
        return rule(q, *given, **options)

    rule, step = hybrid.gated_delta_rule, hybrid.gated_delta_rule_step
    monkeypatch.setattr(hybrid, "gated_delta_rule", counted)
    monkeypatch.setattr(hybrid, "gated_delta_rule_step", stepped)
    return seen


def patched(*given, **more):
    m = model(*given, **more)
    report = tkq_transformers.patch(m)
    assert report.replaced == REPLACED and not report.left
    return m


def test_in_16_bits(calls):
    """Loss and gradients are as near to float32's as transformers' are: together; single ones, of gates above all, are
    as far off as it happens."""
    ids = tokens()
    right, peer, mine = (step(m, ids) for m in (model(torch.float32, "sdpa"), model(attn="sdpa"), patched()))
    assert calls == [(70, False)] * 4
    assert abs(mine[0] - right[0]) <= 1.5 * abs(peer[0] - right[0]) + 2e-3
    assert error(mine[1], right[1]) <= 1.3 * error(peer[1], right[1])
    for name, wanted in right[1].items():
        assert error(mine[1][name], wanted) <= 3 * error(peer[1][name], wanted) + 0.02, name


def test_in_float32(calls):
    """The mixers are transformers' own there."""
    m, ids = model(torch.float32, "sdpa"), tokens()
    want, gradients = step(m, ids)
    tkq_transformers.patch(m)
    got, mine = step(m, ids)
    assert not calls
    torch.testing.assert_close(got, want)
    assert error(mine, gradients) < 1e-4


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("keep", [torch.ones_like(LEFT), LEFT], ids=["whole", "padded"])
def test_generate(cache, keep, calls):
    """The logits of each step are the float32 model's for the tokens before it."""
    m, right = patched().eval(), model(torch.float32, "sdpa").eval()
    out = m.generate(tokens().masked_fill(keep == 0, 0), attention_mask=keep, max_new_tokens=6, do_sample=False,
                     output_logits=True, return_dict_in_generate=True, cache_implementation=cache)
    assert calls == [(70, False)] * 4 + ["step"] * 20
    whole = torch.nn.functional.pad(keep, (0, 5), value=1)
    with torch.no_grad():
        want = right(out.sequences[:, :-1], attention_mask=whole,
                     position_ids=(whole.cumsum(1) - 1).clamp(min=0)).logits[:, 69:]
    assert error(torch.stack(out.logits, 1), want) < 0.03


@pytest.mark.parametrize("cuts", [(40,), (2, 3, 64)])
def test_a_prompt_in_parts(cuts, calls):
    """With more than one token behind a cache: one call's logits; and the cache goes on in an unpatched model."""
    m, ids = patched().eval(), tokens()
    name = "cache" if "cache" in transformers.modeling_outputs.MoeCausalLMOutputWithPast.__dataclass_fields__ else (
        "past_key_values")
    with torch.no_grad():
        want = m(ids).logits
        del calls[:]
        cache, found = transformers.DynamicCache(config=m.config), []
        for part in ids.tensor_split(cuts, 1):
            found.append(m(part, use_cache=True, **{name: cache}).logits)
        assert [call == "step" or call[1] for call in calls] == [False] * 4 + [True] * 4 * len(cuts)
        assert calls.count("step") == 4 * (3 in cuts)
        assert error(torch.cat(found, 1), want) < 0.02
        one = ids[:, :1]
        other = copy.deepcopy(cache)
        mine = m(one, use_cache=True, **{name: cache}).logits
        tkq_transformers.unpatch(m)
        assert error(mine, m(one, use_cache=True, **{name: other}).logits) < 0.02


def test_a_token_with_gradients(calls):
    """Through the cache's state, by the rule itself; the same as a step."""
    m = patched().eval()
    mixer, x = m.model.layers[0].linear_attn, torch.randn(1, 6, 64).to(BF16)
    name, found = hybrid.cache_argument(type(mixer)), []
    for gradients in (True, False):
        cache = transformers.DynamicCache(config=m.config)
        with torch.no_grad():
            mixer(x[:, :5], **{name: cache})
        with torch.set_grad_enabled(gradients):
            found.append(mixer(x[:, 5:], **{name: cache}))
    assert calls == [(5, False), (1, True), (5, False), "step"] and found[0].requires_grad
    assert error(found[0].detach(), found[1]) < 0.02


def test_what_goes_to_the_class_itself(calls):
    """Packed rows whose sequences are numbered, which later versions refuse without fla; and a convolution with hooks,
    as accelerate's that brings weights."""
    def outcome(mixer):
        try:
            return mixer(x, **packed)
        except ValueError as refused:
            return str(refused)

    m, ids = patched().eval(), tokens()
    plain = model().eval()
    packed = dict(seq_idx=torch.zeros(1, 70, dtype=torch.int32))
    mixer, theirs = (x.model.layers[0].linear_attn for x in (m, plain))
    x = torch.randn(1, 70, 64).to(BF16)
    mine, want = outcome(mixer), outcome(theirs)
    assert not calls and type(mine) is type(want)
    assert mine == want if isinstance(want, str) else error(mine, want) < 0.02
    seen = []
    mixer.conv1d.register_forward_pre_hook(lambda module, given: seen.append(module))
    m(ids)
    assert len(calls) == 3


@pytest.mark.parametrize("with_cache", [False, True])
def test_packed_sequences(with_cache, calls):
    """By cu_seq_lens_q, each as if it were alone, at most twice as far from float32 as transformers' in 16 bits; the
    cache goes on behind the last one."""
    x, cuts = torch.randn(1, 80, 64).to(BF16), (0, 3, 70, 80)
    m = patched().eval()
    mixer, right, peer = (made.model.layers[0].linear_attn
                          for made in (m, model(torch.float32, "sdpa").eval(), model(attn="sdpa").eval()))
    parts, name = [slice(*cut) for cut in itertools.pairwise(cuts)], hybrid.cache_argument(type(mixer))
    cache = transformers.DynamicCache(config=m.config) if with_cache else None
    with torch.no_grad():
        found = mixer(x, **{name: cache}, cu_seq_lens_q=torch.tensor(cuts, dtype=torch.int32), max_length_q=67)
        want, theirs = (torch.cat([of(x[:, part].to(dtype)) for part in parts], 1)
                        for of, dtype in ((right, torch.float32), (peer, BF16)))
        assert calls == [(80, False)] and error(found, want) <= 2 * error(theirs, want)
        assert error(right(x.float()), want) > 5 * error(theirs, want)
        if with_cache:
            last = torch.cat((x[:, parts[-1]], torch.randn(1, 1, 64).to(BF16)), 1)
            want, theirs = (of(last.to(dtype))[:, -1:] for of, dtype in ((right, torch.float32), (peer, BF16)))
            assert error(mixer(last[:, -1:], **{name: cache}), want) <= 2 * error(theirs, want)
            assert calls[-1] == "step"


@pytest.mark.parametrize("sizes, why", [
    (dict(linear_key_head_dim=256), "heads of 256 and 48 columns"), (dict(hidden_act="gelu"), "activation gelu")])
def test_what_the_rule_cannot_take_is_left(sizes, why, calls):
    m = model(**sizes)
    report = tkq_transformers.patch(m)
    assert report.left[f"Qwen3NextGatedDeltaNet: {why}"] == 4 and "Qwen3NextGatedDeltaNet" not in report.replaced
    assert m(tokens()).logits.isfinite().all() and not calls


def test_under_autocast(calls):
    ids = tokens()
    m, right = model(torch.float32, "sdpa"), step(model(torch.float32, "sdpa"), ids)
    tkq_transformers.patch(m)
    with torch.autocast("cpu", BF16):
        mine = step(m, ids)
    assert len(calls) == 4 and error(mine[1], right[1]) < 0.05


def test_a_patched_model_is_the_same_to_others():
    m, ids = model().eval(), tokens()
    keys, parameters, logits = list(m.state_dict()), list(m.parameters()), m(ids).logits
    assert tkq_transformers.patch(m).replaced == REPLACED and not tkq_transformers.patch(m).replaced
    assert list(m.state_dict()) == keys and all(a is b for a, b in zip(m.parameters(), parameters))
    found = m(ids).logits
    assert torch.equal(pickle.loads(pickle.dumps(m))(ids).logits, found) and not torch.equal(found, logits)
    tkq_transformers.unpatch(m)
    assert type(m.model.layers[0].linear_attn).__module__.startswith("transformers.")
    assert torch.equal(m(ids).logits, logits)


def test_with_checkpoints():
    m, ids = patched(), tokens()
    want = step(m, ids)
    m.gradient_checkpointing_enable(dict(use_reentrant=False))
    assert error(step(m.train(), ids)[1], want[1]) < 1e-6


def test_linear_layers():
    m, ids = model(), tokens()
    wanted = step(m, ids)
    assert tkq_transformers.patch(m, linear="tkq").replaced["Linear"] == 4 * 3 + 4 + 5 * 3 + 3
    assert error(step(m, ids)[1], wanted[1]) < 0.1


def test_routers_are_in_the_output():
    """The loss is transformers' own, with what balances the experts."""
    m, ids = patched(output_router_logits=True), tokens()
    out = m(ids, labels=ids)
    assert out.logits is not None and out.aux_loss is not None and len(out.router_logits) == 3


def test_compiled():
    """In one graph."""
    m, ids = patched(num_experts=0, mlp_only_layers=list(range(5))), tokens()
    want = step(m, ids)
    torch._dynamo.reset()
    got = step(torch.compile(m, backend="aot_eager", fullgraph=True), ids)
    torch.testing.assert_close(got[0], want[0], rtol=1e-2, atol=0)
    assert error(dict(zip(want[1], got[1].values())), want[1]) < 0.03
