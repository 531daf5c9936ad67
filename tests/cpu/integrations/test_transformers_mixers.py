"""tkq.integrations.transformers.patch on Kimi Linear, Mamba-2, Bamba, Granite 4 and Nemotron-H, of a few thousand
parameters, by tkq's CPU references: at most twice as far from float32 as the unpatched model of 16 bits is."""
import copy
import inspect
import itertools
import pickle

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.17", reason="transformers is not installed")

import tkq.integrations.transformers as tkq_transformers  # noqa: E402
from tests.helpers.hybrid_models import MODELS, assert_as_near, make, mixers, outcome, tokens  # noqa: E402
from tests.helpers.qwen3_next import error  # noqa: E402
from tkq.integrations import transformers_hybrid as hybrid  # noqa: E402
from tkq.integrations import transformers_kimi, transformers_mamba  # noqa: E402

BF16 = torch.bfloat16
LEFT = torch.ones(2, 70, dtype=torch.long)
LEFT[0, :20] = 0
EACH = pytest.mark.parametrize("name", MODELS)
TWO = pytest.mark.parametrize("name", ["KimiLinear", "Mamba2"])  # one of each code


@pytest.fixture
def calls(monkeypatch):
    """The op of each call of a mixer, with how many tokens, and whether with a state; or "step"."""
    seen = []

    def counted(op, state, first):
        def call(*given, **options):
            seen.append((given[first].shape[1], given[state] is not None))
            return op(*given, **options)

        return call

    def stepped(op):
        def call(*given):
            seen.append("step")
            return op(*given)

        return call

    monkeypatch.setattr(transformers_kimi, "gated_delta_rule", counted(transformers_kimi.gated_delta_rule, 6, 0))
    monkeypatch.setattr(transformers_mamba, "mamba2_ssd", counted(transformers_mamba.mamba2_ssd, 8, 0))
    for module, name in ((transformers_kimi, "gated_delta_rule_step"), (transformers_mamba, "ssd_step")):
        monkeypatch.setattr(module, name, stepped(getattr(module, name)))
    return seen


def patched(model, *given, **more):
    m = make(model, *given, **more)
    report = tkq_transformers.patch(m)
    assert report.replaced == model.replaces and not report.left
    return m


def cache_name(module):
    names = inspect.signature(module.forward).parameters
    return next(name for name in ("cache", "cache_params", "past_key_values") if name in names)


@EACH
def test_in_16_bits(name, calls):
    """Logits and gradients."""
    model, batches = MODELS[name], [tokens(seed=seed) for seed in range(3)]
    right, peer, mine = ([outcome(m, ids) for ids in batches]
                         for m in (make(model, torch.float32), make(model), patched(model)))
    assert calls == [(70, False)] * model.count * 3
    assert_as_near(mine, peer, right)


@TWO
def test_in_float32(name, calls):
    """The mixers are transformers' own there."""
    m, ids = make(MODELS[name], torch.float32), tokens()
    want = outcome(m, ids)
    tkq_transformers.patch(m)
    mine = outcome(m, ids)
    assert not calls and all(error(mine[n], x) < 1e-4 for n, x in want.items() if x.any())


def whole(m, ids, keep):
    with torch.no_grad():
        return m(ids, attention_mask=keep, use_cache=False).logits


@EACH
@pytest.mark.parametrize("keep", [torch.ones_like(LEFT), LEFT], ids=["whole", "padded"])
def test_generate(name, keep, calls):
    """The logits of each step are the model's for the tokens before it."""
    model = MODELS[name]
    m = patched(model).eval()
    out = m.generate(tokens().masked_fill(keep == 0, 0), attention_mask=keep, max_new_tokens=6, do_sample=False,
                     output_logits=True, return_dict_in_generate=True, eos_token_id=-1)
    assert calls == [(70, False)] * model.count + ["step"] * 5 * model.count
    keep = torch.nn.functional.pad(keep, (0, 5), value=1)
    right, peer = (whole(make(model, dtype).eval(), out.sequences[:, :-1], keep)[:, 69:]
                   for dtype in (torch.float32, BF16))
    assert error(torch.stack(out.logits, 1), right) <= 2 * error(peer, right)


def test_generate_with_a_static_cache(calls):
    model = MODELS["Bamba"]
    m, ids = patched(model).eval(), tokens()
    found = [m.generate(ids, max_new_tokens=4, do_sample=False, output_logits=True, return_dict_in_generate=True,
                        cache_implementation=kind, eos_token_id=-1, disable_compile=True)
             for kind in ("static", "dynamic")]
    assert calls == ([(70, False)] * 2 + ["step"] * 6) * 2
    torch.testing.assert_close(*(torch.stack(out.logits, 1) for out in found))


@EACH
@pytest.mark.parametrize("cuts", [(40,), (2, 3, 64)])
def test_a_prompt_in_parts(name, cuts, calls):
    """With more than one token behind a cache; and the cache goes on in an unpatched model."""
    model, ids = MODELS[name], tokens()
    m, given = patched(model).eval(), cache_name(patched(model))
    right, peer = (whole(make(model, dtype).eval(), ids, None) for dtype in (torch.float32, BF16))
    bound = 2 * error(peer, right)
    with torch.no_grad():
        cache, found = transformers.DynamicCache(config=m.config), []
        for part in ids.tensor_split(cuts, 1):
            found.append(m(part, use_cache=True, **{given: cache}).logits)
        assert [call == "step" or call[1] for call in calls] == (
            [False] * model.count + [True] * model.count * len(cuts))
        assert calls.count("step") == model.count * (3 in cuts)
        assert error(torch.cat(found, 1), right) <= bound
        one, other = ids[:, :1], copy.deepcopy(cache)
        mine = m(one, use_cache=True, **{given: cache}).logits
        tkq_transformers.unpatch(m)
        assert error(mine, m(one, use_cache=True, **{given: other}).logits) <= bound


@TWO
def test_a_token_with_gradients(name, calls):
    """Through the cache's state, by the op itself; the same as a step."""
    model = MODELS[name]
    m = patched(model).eval()
    mixer, x, found = mixers(model, m)[0], torch.randn(1, 6, 64).to(BF16), []
    given = hybrid.cache_argument(type(mixer))
    for gradients in (True, False):
        cache = transformers.DynamicCache(config=m.config)
        with torch.no_grad():
            mixer(x[:, :5], **{given: cache})
        with torch.set_grad_enabled(gradients):
            found.append(mixer(x[:, 5:], **{given: cache}))
    assert calls == [(5, False), (1, True), (5, False), "step"] and found[0].requires_grad
    exact = mixers(model, make(model, torch.float32).eval())[0](x.float())[:, 5:]
    peer = mixers(model, make(model).eval())[0](x)[:, 5:]
    assert error(found[0], found[1]) <= 2 * error(peer, exact)


@EACH
def test_what_goes_to_the_class_itself(name, calls):
    """Rows whose packed sequences are numbered, and a convolution with hooks, as accelerate's that brings weights."""
    model = MODELS[name]
    m, seen = patched(model).eval(), []
    mixer, theirs = (mixers(model, made)[0] for made in (m, make(model).eval()))
    x = torch.randn(1, 70, 64).to(BF16)
    named = dict(seq_idx=torch.zeros(1, 70, dtype=torch.int32))

    def found(mixer):
        try:
            return mixer(x, **named)
        except ValueError as refused:
            return str(refused)

    mine, want = found(mixer), found(theirs)
    assert not calls and (mine == want if isinstance(want, str) else torch.equal(mine, want))
    mixer.conv1d.register_forward_pre_hook(lambda module, given: seen.append(module))
    m(tokens())
    assert len(calls) == model.count - 1


@EACH
@pytest.mark.parametrize("with_cache", [False, True])
def test_packed_sequences(name, with_cache, calls):
    """By cu_seq_lens_q, each as if it were alone, and the cache goes on behind the last one."""
    model, x, cuts = MODELS[name], torch.randn(1, 80, 64).to(BF16), (0, 3, 70, 80)
    m, wide, plain = patched(model).eval(), make(model, torch.float32).eval(), make(model).eval()
    mixer, right, peer = (mixers(model, made)[0] for made in (m, wide, plain))
    parts, given = [slice(*cut) for cut in itertools.pairwise(cuts)], hybrid.cache_argument(type(mixer))
    cache = transformers.DynamicCache(config=m.config) if with_cache else None
    with torch.no_grad():
        found = mixer(x, **{given: cache}, cu_seq_lens_q=torch.tensor(cuts, dtype=torch.int32), max_length_q=67)
        want, theirs = (torch.cat([of(x[:, part].to(dtype)) for part in parts], 1)
                        for of, dtype in ((right, torch.float32), (peer, BF16)))
        assert calls == [(80, False)] and error(found, want) <= 2 * error(theirs, want)
        assert error(right(x.float()), want) > 5 * error(theirs, want)
        if with_cache:
            one, both = torch.randn(1, 1, 64).to(BF16), x[:, parts[-1]]
            want, theirs = (of(torch.cat((both, one), 1).to(dtype))[:, -1:]
                            for of, dtype in ((right, torch.float32), (peer, BF16)))
            assert error(mixer(one, **{given: cache}), want) <= 2 * error(theirs, want)
            assert calls[-1] == "step"


def test_steps_of_a_model_with_limits(calls):
    """transformers clamps step sizes of a prompt, and not of a token behind it."""
    model, x = MODELS["Mamba2"], torch.randn(1, 6, 64).to(BF16)
    found, limits = [], dict(time_step_limit=(0.0, 0.005))
    for made in (patched(model, **limits), make(model, **limits), make(model, torch.float32, **limits)):
        mixer, cache = mixers(model, made.eval())[0], transformers.DynamicCache(config=made.config)
        with torch.no_grad():
            parts = [mixer(t.to(made.dtype), **{hybrid.cache_argument(type(mixer)): cache}) for t in x.split(5, 1)]
        found.append(torch.cat(parts, 1))
    assert calls == [(5, False), "step"]
    mine, peer, right = found
    assert error(mine, right) <= 2 * error(peer, right)
    without = mixers(model, make(model, torch.float32).eval())[0](x.float())
    assert error(mine[:, :5], without[:, :5]) > 5 * error(mine, right)


@pytest.mark.parametrize("name, sizes, why", [
    ("KimiLinear", dict(hidden_act="gelu"), "activation gelu"),
    ("KimiLinear", dict(linear_head_dim=24), "heads of 24 columns"),
    ("KimiLinear", dict(linear_head_dim=144), "heads of 144 columns"),
    ("Mamba2", dict(hidden_act="gelu"), "activation gelu"),
    ("Mamba2", dict(state_size=24), "heads of 32 columns and states of 24"),
    ("Bamba", dict(mamba_d_head=8, mamba_n_heads=16), "heads of 8 columns and states of 32")])
def test_what_the_ops_cannot_take_is_left(name, sizes, why, calls):
    model = MODELS[name]
    m = make(model, **sizes)
    report = tkq_transformers.patch(m)
    mixer = model.name + model.mixer
    assert report.left[f"{mixer}: {why}"] == model.count and mixer not in report.replaced
    assert m(tokens()).logits.isfinite().all() and not calls


@EACH
def test_under_autocast(name, calls):
    model, ids = MODELS[name], tokens()
    m, right = make(model, torch.float32), outcome(make(model, torch.float32), ids)
    with torch.autocast("cpu", BF16):
        peer = outcome(m, ids)
        tkq_transformers.patch(m)
        mine = outcome(m, ids)
    assert len(calls) == model.count
    together = [torch.cat([x.double().flatten() for n, x in each.items() if n != "logits"])
                for each in (right, peer, mine)]
    assert error(mine["logits"], right["logits"]) <= 2 * error(peer["logits"], right["logits"])
    assert error(together[2], together[0]) <= 2 * error(together[1], together[0])


@EACH
def test_a_patched_model_is_the_same_to_others(name):
    model = MODELS[name]
    m, ids = make(model).eval(), tokens()
    keys, parameters, logits = list(m.state_dict()), list(m.parameters()), m(ids).logits
    assert tkq_transformers.patch(m).replaced == model.replaces and not tkq_transformers.patch(m).replaced
    assert list(m.state_dict()) == keys and all(a is b for a, b in zip(m.parameters(), parameters))
    found = m(ids).logits
    assert torch.equal(pickle.loads(pickle.dumps(m))(ids).logits, found) and not torch.equal(found, logits)
    tkq_transformers.unpatch(m)
    assert type(mixers(model, m)[0]).__module__.startswith("transformers.")
    assert torch.equal(m(ids).logits, logits)


@TWO
def test_modules_with_hooks_are_called(name):
    """Norms and gates that a mixer computes itself otherwise."""
    model, seen = MODELS[name], []
    m, ids = patched(model).eval(), tokens()
    want = m(ids).logits
    mixer = mixers(model, m)[0]
    inner = [mixer.o_norm, mixer.forget_gate] if name == "KimiLinear" else [mixer.norm]
    for module in inner:
        module.register_forward_hook(lambda module, given, found: seen.append(module))
    found = m(ids).logits
    assert set(map(id, seen)) == set(map(id, inner))
    right, peer = (whole(make(model, dtype).eval(), ids, None) for dtype in (torch.float32, BF16))
    assert error(found, want) <= 2 * error(peer, right)


@EACH
def test_linear_layers(name):
    """Of all layers, whose own forward stays."""
    model, ids = MODELS[name], tokens()
    m = make(model)
    count = sum(type(x) is torch.nn.Linear for x in m.modules()) - 1  # but the head
    report = tkq_transformers.patch(m, linear="tkq")
    assert report.replaced["Linear"] == count and not any("Layer" in n and "Mamba" not in n for n in report.replaced)
    right, peer = (whole(make(model, dtype).eval(), ids, None) for dtype in (torch.float32, BF16))
    assert error(whole(m.eval(), ids, None), right) <= 2 * error(peer, right)


@TWO
def test_with_checkpoints(name):
    model, ids = MODELS[name], tokens()
    m = patched(model)
    want = outcome(m, ids)
    m.gradient_checkpointing_enable(dict(use_reentrant=False))
    found = outcome(m.train(), ids)
    assert all(torch.equal(found[n], x) for n, x in want.items())


def test_compiled():
    """In one graph."""
    model, ids = MODELS["Mamba2"], tokens()
    m = patched(model)
    want = outcome(m, ids)
    torch._dynamo.reset()
    got = outcome(torch.compile(m, backend="aot_eager", fullgraph=True), ids)
    right, peer = (outcome(make(model, dtype), ids) for dtype in (torch.float32, BF16))
    assert error(got["logits"], want["logits"]) <= 2 * error(peer["logits"], right["logits"])
