"""A patched model is called, extended and saved as it was before (tkq.integrations.transformers.patch)."""
import inspect

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.17", reason="transformers is not installed")

import tkq.integrations.transformers as tkq_transformers  # noqa: E402
from tests.cpu.test_transformers_cpu import LEFT, MORE, model, quiet, tokens  # noqa: E402, F401

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
