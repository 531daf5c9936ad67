"""Small random models of transformers that are decoders with something of their own: experts, fused projections, norms
in other places, multipliers. All experts are used, as which ones are is decided otherwise after another rounding."""
from typing import NamedTuple

import torch
import transformers

BASE = dict(vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, max_position_embeddings=64, pad_token_id=0, bos_token_id=1,
            eos_token_id=None)
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=32)


class Model(NamedTuple):
    """more: of the config. replaced: modules by the ends of their classes' names."""

    name: str
    replaced: dict
    more: dict = {}  # noqa: RUF012  never written to
    config: str = "Config"

    @property
    def report(self) -> dict:
        return {self.name + ending: count for ending, count in self.replaced.items()}

    def make(self, dtype=torch.float32, attn=None, device="cpu", **more):
        """The same parameters, numbers of bf16, in each type. attn: what the class has, sdpa before eager, where not
        given."""
        cls = getattr(transformers, f"{self.name}ForCausalLM")
        config = getattr(transformers, self.name + self.config)(**{**BASE, **self.more, **more})
        config._attn_implementation = attn or ("sdpa" if cls._supports_sdpa else "eager")
        torch.manual_seed(0)
        made = cls(config)
        for name, p in made.named_parameters():  # norms' weights too
            p.data.add_(torch.randn_like(p) * (2 if name.endswith("sinks") else 0.1))
        return made.to(torch.bfloat16).to(device, dtype)


def _each(norms, **more):
    """Of two layers."""
    return {"RMSNorm": norms, "MLP": 2, "Attention": 2, "DecoderLayer": 2, "ForCausalLM": 1, **more}


MODELS = {model.name: model for model in (
    Model("Qwen3Moe", _each(9, MLP=1), dict(EXPERTS, num_experts=2, mlp_only_layers=[1])),
    Model("Phi3", _each(5), dict(partial_rotary_factor=0.5, sliding_window=5)),
    Model("Glm", _each(5)),
    Model("Glm4", _each(9)),
    Model("DeepseekV3", _each(9), dict(  # one layer with experts, which has a shared MLP
        EXPERTS, head_dim=8, num_key_value_heads=4, n_routed_experts=2, n_group=1, topk_group=1,
        first_k_dense_replace=1, q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=24, qk_rope_head_dim=8,
        v_head_dim=16)),
    Model("GptOss", {"RMSNorm": 5, "Attention": 2, "DecoderLayer": 2, "ForCausalLM": 1}, dict(
        num_local_experts=2, num_experts_per_tok=2, sliding_window=5,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0))),
    Model("Olmo", {"LayerNorm": 5, "MLP": 2, "Attention": 2, "DecoderLayer": 2, "ForCausalLM": 1}),
    Model("Olmo2", _each(9)),
    Model("Olmo3", _each(9), dict(sliding_window=5, layer_types=["sliding_attention", "full_attention"])),
    Model("Granite", _each(5), dict(residual_multiplier=0.22, logits_scaling=8.0, attention_multiplier=0.3,
                                    embedding_multiplier=12.0)),
    Model("Gemma4", {"RMSNorm": 30, "TextMLP": 4, "TextAttention": 4, "ForCausalLM": 1}, dict(
        sliding_window=5, hidden_size_per_layer_input=8, vocab_size_per_layer_input=96, num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2, num_kv_shared_layers=2, global_head_dim=32,
        num_global_key_value_heads=1), "TextConfig"),
)}


def tokens(B=2, S=12, device="cpu"):
    return torch.randint(2, 96, (B, S), generator=torch.Generator().manual_seed(1)).to(device)


def step(m, ids, **more):
    """(loss, all gradients by name) in training."""
    m.train().zero_grad()
    loss = m(input_ids=ids, labels=ids, use_cache=False, **more).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in m.named_parameters() if p.grad is not None}


def error(found, wanted) -> float:
    """Relative, of tensors or of dicts of them together."""
    if isinstance(wanted, dict):
        found, wanted = (torch.cat([x[name].double().flatten() for name in wanted]) for x in (found, wanted))
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()
