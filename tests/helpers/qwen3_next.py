"""Small random models of transformers' Qwen3-Next: three layers of the gated delta rule, one of attention, one more of
the former. All experts are used, as which ones are is decided otherwise after another rounding."""
import torch
import transformers

SIZES = dict(vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=5, num_attention_heads=4,
             num_key_value_heads=2, head_dim=32, max_position_embeddings=512, pad_token_id=0, linear_num_key_heads=2,
             linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=48, num_experts=2,
             num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32,
             mlp_only_layers=[1, 3])
REPLACED = {"Qwen3NextDecoderLayer": 5, "Qwen3NextGatedDeltaNet": 4, "Qwen3NextRMSNormGated": 4, "Qwen3NextMLP": 5,
            "Qwen3NextRMSNorm": 13, "Qwen3NextAttention": 1}


def model(dtype=torch.bfloat16, attn="tkq", device="cpu", **more):
    """The same parameters, numbers of bf16, in each type."""
    config = transformers.Qwen3NextConfig(**{**SIZES, **more})
    config._attn_implementation = attn
    torch.manual_seed(0)
    made = transformers.Qwen3NextForCausalLM(config)
    for p in made.parameters():  # norms' weights too
        p.data.add_(torch.randn_like(p) * 0.05)
    return made.to(torch.bfloat16).to(device, dtype)


def tokens(B=2, S=70, device="cpu"):
    return torch.randint(1, 96, (B, S), generator=torch.Generator().manual_seed(1)).to(device)


def step(m, ids, **more):
    """(loss, all gradients by name)"""
    m.zero_grad()
    loss = m(input_ids=ids, labels=ids, use_cache=False, **more).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in m.named_parameters()}


def error(found, wanted) -> float:
    """Relative, of tensors or of dicts of them together."""
    if isinstance(wanted, dict):
        found, wanted = (torch.cat([x.double().flatten() for x in each.values()]) for each in (found, wanted))
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


def by_kind(gradients: dict) -> dict:
    """{a parameter's name without its layer's number: {name: gradient} of all layers}"""
    found = {}
    for name, gradient in gradients.items():
        kind = ".".join(word for word in name.split(".") if not word.isdigit())
        found.setdefault(kind, {})[name] = gradient
    return found
