"""Models of transformers whose norms, or all of whose parameters, are of another type."""
import copy

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17", reason="transformers is not installed")
import tkq.integrations.transformers as tkq_transformers
from tests.cpu.integrations.test_transformers_cpu import model


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Gemma2"])
@pytest.mark.parametrize("cast", [False, True])
def test_norms_of_another_type_give_what_the_model_s_own_give(name, cast):
    """float32 norms in a bf16 model, and under autocast."""
    plain = model(name, torch.bfloat16)
    for module in plain.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.float()
    patched, ids = copy.deepcopy(plain), torch.randint(0, 64, (1, 9))
    tkq_transformers.patch(patched)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=cast):
        try:
            want = plain.model(input_ids=ids).last_hidden_state
        except RuntimeError:  # types that its own linear layers do not take
            pytest.skip("the model itself refuses it")
        found = patched.model(input_ids=ids).last_hidden_state
    assert found.dtype == want.dtype
    torch.testing.assert_close(found.float(), want.float(), rtol=0.1, atol=0.1)


def test_a_float64_model_is_left_as_it_is():
    plain = model("Llama", torch.float64)
    patched, ids = copy.deepcopy(plain), torch.randint(0, 64, (1, 9))
    report = tkq_transformers.patch(patched)
    assert not report.replaced and all("torch.float64" in why for why in report.left)
    assert torch.equal(patched(input_ids=ids).logits, plain(input_ids=ids).logits)
