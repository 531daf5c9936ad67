"""transformers' decoders with something of their own (experts, latent keys, sinks, multipliers and so on) on tkq's
kernels, from configs with random weights: as near to float32 as transformers' eager attention and modules in bf16."""
import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.17", reason="transformers is not installed")

import tkq.integrations.transformers as tkq_transformers  # noqa: E402
from tests.helpers.decoder_models import MODELS, error, step, tokens  # noqa: E402

BF16 = torch.bfloat16
EACH = pytest.mark.parametrize("name", MODELS)
# heads of other tests' kernels
SIZES = dict(hidden_size=256, intermediate_size=512, head_dim=64, max_position_embeddings=512)
MORE = {"DeepseekV3": dict(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, q_lora_rank=64, kv_lora_rank=64),
        "Gemma4": dict(global_head_dim=128)}


def model(name, dtype=BF16, attn="tkq"):
    return MODELS[name].make(dtype, attn, "cuda", **SIZES, **MORE.get(name, {}))


def patched(name):
    m = model(name)
    report = tkq_transformers.patch(m)
    assert report.replaced == MODELS[name].report and not report.left
    return m


@EACH
def test_a_step(name):
    ids = tokens(S=200, device="cuda")
    right, peer, mine = (step(m, ids) for m in (model(name, torch.float32, "eager"), model(name, attn="eager"),
                                                patched(name)))
    assert abs(mine[0] - right[0]) <= 2 * abs(peer[0] - right[0]) + 0.01
    assert error(mine[1], right[1]) <= 1.5 * error(peer[1], right[1])


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@EACH
def test_generate(name, cache):
    """With padding: the logits of each step are the model's for the tokens before it."""
    m, ids = patched(name).eval(), tokens(S=70, device="cuda")
    keep = torch.ones_like(ids)
    keep[0, :10] = 0
    out = m.generate(ids.masked_fill(keep == 0, 0), attention_mask=keep, max_new_tokens=8, do_sample=False,
                     output_logits=True, return_dict_in_generate=True, cache_implementation=cache, disable_compile=True)
    keep = torch.nn.functional.pad(keep, (0, 7), value=1)
    with torch.no_grad():
        right, peer = (model(name, dtype, "eager").eval()(
            out.sequences[:, :-1], attention_mask=keep, position_ids=(keep.cumsum(1) - 1).clamp(min=0),
            use_cache=False).logits[:, 69:] for dtype in (torch.float32, BF16))
    assert error(torch.stack(out.logits, 1), right) <= 1.5 * error(peer, right) + 0.005
