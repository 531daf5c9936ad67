"""A patched model is called, extended and saved as it was before (tkq.integrations.transformers.patch)."""
import inspect
import pathlib
import subprocess
import sys

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.17", reason="transformers is not installed")

import tkq.integrations.transformers as tkq_transformers  # noqa: E402
from tests.cpu.integrations.test_transformers_cpu import LEFT, MORE, model, quiet, tokens  # noqa: E402, F401

MASKED = dict(attention_mask=LEFT)


# ---- calls -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MORE)
def test_the_parameters_are_the_original_ones(name):
    m = model(name)
    wanted = inspect.signature(m.forward)
    tkq_transformers.patch(m)
    assert inspect.signature(m.forward) == wanted and "attention_mask" in wanted.parameters


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", MORE)
def test_arguments_by_their_places(name, train):
    """The second one is the mask, and so on up to the labels."""
    m, ids = model(name, torch.bfloat16).train(train), tokens()
    tkq_transformers.patch(m)
    with torch.no_grad():
        wanted, found = m(input_ids=ids, **MASKED), m(ids, LEFT)
        assert found.loss is None and torch.equal(found.logits, wanted.logits)
        given = ids, LEFT, None, None, None, ids
        wanted, found = m(input_ids=ids, labels=ids, **MASKED), m(*given)
    assert torch.equal(found.loss, wanted.loss) and (found.logits is None) == train
    for wrong in (lambda: m(ids, input_ids=ids), lambda: m(*given, False, 0, 0)):
        with pytest.raises(TypeError, match="multiple values|positional arguments"):
            wrong()


def test_generate_finds_what_is_padded():
    """By the pad tokens: where it is given no mask it asks for the parameters of forward whether one can be."""
    m = model("Llama")
    ids = tokens().masked_fill(LEFT == 0, 0)
    how = dict(max_new_tokens=4, do_sample=False, output_logits=True, return_dict_in_generate=True)
    wanted = m.generate(ids, **how)
    tkq_transformers.patch(m)
    found = m.generate(ids, **how)
    assert torch.equal(found.sequences, wanted.sequences)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(wanted.logits), rtol=1e-4, atol=1e-5)


# ---- what others have put into a model -------------------------------------------------------------------------------


def put(where, make):
    """A change of the first layer: what is at ``where`` becomes what ``make`` says."""
    def change(m):
        path, _, name = f"model.layers.0.{where}".rpartition(".")
        parent = m.get_submodule(path)
        setattr(parent, name, make(getattr(parent, name)))

    return change


def of_its_own(module):
    forward = module.forward
    module.forward = lambda *args: forward(*args).cos()
    return module


def hooked(module):
    module.register_forward_hook(lambda module, given, y: y.cos())
    return module


def subclassed(module):
    forward = type(module).forward
    module.__class__ = type("Changed", (type(module),), {"forward": lambda self, x: forward(self, x).cos()})
    return module


class Adapted(torch.nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base, self.more = base, torch.nn.Linear(base.in_features, base.out_features)

    def forward(self, x):
        return self.base(x) + self.more(x)


def offloaded(module):
    """As accelerate's: the parameters are there during a call alone."""
    weights, forward = {name: p.detach() for name, p in module.named_parameters()}, module.forward

    def with_parameters(*args, **kwargs):
        put_in(weights)
        y = forward(*args, **kwargs)
        put_in({name: p.to("meta") for name, p in weights.items()})
        return y

    def put_in(values):
        for name, value in values.items():
            setattr(module, name, torch.nn.Parameter(value, requires_grad=False))

    put_in({name: p.to("meta") for name, p in weights.items()})
    module.forward = with_parameters
    return module


def offload_all(m):
    for module in m.modules():
        if not list(module.children()):
            offloaded(module)


NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm")
OTHERS = {
    **{f"{norm}, {make.__name__}": put(norm, make) for norm in NORMS for make in (of_its_own, hooked, subclassed)},
    "LayerNorm": put("input_layernorm", lambda norm: torch.nn.LayerNorm(64)),
    "nn.RMSNorm": put("post_attention_layernorm", lambda norm: torch.nn.RMSNorm(64)),
    "Identity": put("post_attention_layernorm", lambda norm: torch.nn.Identity()),
    **{f"{where}, {make.__name__}": put(where, make) for make in (Adapted, of_its_own, hooked, subclassed)
       for where in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")},
    **{f"{where}, {make.__name__}": put(where, make) for make in (of_its_own, hooked, subclassed)
       for where in ("mlp", "mlp.act_fn")},
    "offloaded": offload_all,
}


@pytest.mark.parametrize("patched_first", [False, True])
@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
@pytest.mark.parametrize("change", OTHERS)
def test_changes_by_others_count(change, name, patched_first):
    if "pre_feedforward" in change and name == "Llama":
        pytest.skip("Llama's layers have no such norm")
    m, right, ids = model(name), model(name), tokens()
    plain = right(ids).logits
    for each in (right, m):
        if each is m and patched_first:
            tkq_transformers.patch(m)
        torch.manual_seed(2)
        OTHERS[change](each)
    tkq_transformers.patch(m)
    wanted = right(ids).logits
    torch.testing.assert_close(m(ids).logits, wanted, rtol=1e-4, atol=1e-4)
    assert change == "offloaded" or not torch.allclose(wanted, plain, atol=1e-2)


@pytest.mark.parametrize("make", [of_its_own, hooked])
def test_changes_of_the_head_count_in_the_loss(make):
    m, ids = model("Llama", torch.bfloat16).train(), tokens()
    make(m.lm_head)
    wanted = m(ids, labels=ids).loss
    tkq_transformers.patch(m)
    torch.testing.assert_close(m(ids, labels=ids).loss, wanted, rtol=1e-2, atol=0)


# ---- once more, and saved --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("linear", ["tkq", "fp8", "fp8_block"])
@pytest.mark.parametrize("before", [None, "tkq", "fp8", "fp8_tensor"])
def test_linear_layers_in_a_second_call(before, linear):
    m, right, ids = model("Llama", torch.bfloat16), model("Llama", torch.bfloat16), tokens()
    tkq_transformers.patch(right, linear=linear)
    tkq_transformers.patch(m, linear=before)
    assert tkq_transformers.patch(m, linear=linear).replaced == ({} if before == linear else {"Linear": 14})
    for a, b in zip(m.modules(), right.modules(), strict=True):
        assert type(a) is type(b) and getattr(a, "recipe", None) == getattr(b, "recipe", None)
    assert torch.equal(m(ids).logits, right(ids).logits)
    assert not tkq_transformers.patch(m).replaced and not tkq_transformers.patch(m, linear=linear).replaced
    tkq_transformers.unpatch(m)
    assert {type(x) for x in m.modules()} == {type(x) for x in model("Llama").modules()}


def test_weights_that_are_not_kept_in_a_second_call():
    m = model("Llama", torch.bfloat16)
    tkq_transformers.patch(m, linear="fp8")
    assert tkq_transformers.patch(m, linear="fp8", keep_weight=False).replaced == {"Linear": 14}
    assert not m.model.layers[1].mlp.up_proj.recipe.keep_weight


ELSEWHERE = """
import sys, torch
m, ids, wanted = torch.load(sys.argv[1], weights_only=False)
assert torch.equal(m(ids).logits, wanted)
"""


@pytest.mark.parametrize("linear", [None, "tkq", "fp8"])
@pytest.mark.parametrize("name", MORE)
def test_pickled(name, linear, tmp_path):
    """And loaded, in this process and in one that has patched nothing."""
    m, ids = model(name, torch.bfloat16, "tkq").eval(), tokens()
    tkq_transformers.patch(m, linear=linear)
    wanted = m(ids).logits
    torch.save((m, ids, wanted.detach()), tmp_path / "model.pt")
    found, _, _ = torch.load(tmp_path / "model.pt", weights_only=False)
    assert [type(x) for x in found.modules()] == [type(x) for x in m.modules()]
    assert torch.equal(found(ids).logits, wanted)
    if linear == "fp8" and name in ("Llama", "Gemma3"):
        subprocess.run([sys.executable, "-c", ELSEWHERE, tmp_path / "model.pt"], check=True,
                       cwd=pathlib.Path(__file__).parents[3])


def test_names_that_are_no_classes():
    assert not hasattr(tkq_transformers, "LlamaTokenizer") and not hasattr(tkq_transformers, "Linear")
