"""Small random models of transformers with mixers of Kimi Delta Attention and of Mamba-2. All experts are used, as
which ones are is decided otherwise after another rounding."""
from typing import NamedTuple

import torch
import transformers

from tests.helpers.qwen3_next import error


class Model(NamedTuple):
    """name: of its classes. sizes: of its config. mixer: its class's ending; count: how many a model has. replaced:
    what else patch replaces, by endings. at: where a layer has its mixer."""

    name: str
    sizes: dict
    mixer: str
    count: int
    replaced: dict
    at: str

    @property
    def replaces(self) -> dict:
        return {self.name + ending: count for ending, count in {self.mixer: self.count, **self.replaced}.items()}


_COMMON = dict(vocab_size=96, hidden_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)
_ATTENTION = dict(intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
                  max_position_embeddings=512)
_MAMBA = dict(mamba_n_heads=4, mamba_d_head=32, mamba_n_groups=2, mamba_d_state=32)
_TYPES = ["linear_attention", "full_attention", "linear_attention"]
MODELS = {model.name: model for model in (
    Model("KimiLinear", dict(**_COMMON, **_ATTENTION | dict(num_key_value_heads=4), layer_types=_TYPES,
                             linear_head_dim=32, linear_num_heads=2, kv_lora_rank=32, qk_rope_head_dim=16,
                             qk_nope_head_dim=16, v_head_dim=32, num_local_experts=2, num_experts_per_tok=2,
                             moe_intermediate_size=32, mlp_layer_types=["dense", "sparse", "dense"]),
          "DeltaAttention", 2, {"RMSNorm": 8, "MLP": 3}, "self_attn"),
    Model("Mamba2", dict(**_COMMON, num_hidden_layers=3, num_heads=4, head_dim=32, state_size=32, n_groups=2, expand=2),
          "Mixer", 3, {"RMSNorm": 4}, "mixer"),
    Model("Bamba", dict(**_COMMON, **_ATTENTION, **_MAMBA, attn_layer_indices=[1]),
          "Mixer", 2, {"RMSNorm": 7, "MLP": 3}, "mamba"),
    Model("GraniteMoeHybrid", dict(**_COMMON, **_ATTENTION, **_MAMBA, layer_types=_TYPES, num_local_experts=2,
                                   num_experts_per_tok=2, shared_intermediate_size=96, residual_multiplier=0.5,
                                   attention_multiplier=0.25, embedding_multiplier=2.0, logits_scaling=2.0),
          "MambaLayer", 2, {"RMSNorm": 7, "MLP": 3}, "mamba"),
    Model("NemotronH", dict(**_COMMON, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                            max_position_embeddings=512, layers_block_type=[_TYPES[0], "mlp", *_TYPES[1:]],
                            mamba_num_heads=4, mamba_head_dim=32, n_groups=2, ssm_state_size=32),
          "Mamba2Mixer", 2, {"RMSNorm": 5}, "mixer"))}


def make(model: Model, dtype=torch.bfloat16, attn="eager", device="cpu", **more):
    """The same parameters, numbers of bf16, in each type."""
    config = getattr(transformers, f"{model.name}Config")(**{**model.sizes, **more})
    config._attn_implementation = attn
    torch.manual_seed(0)
    made = getattr(transformers, f"{model.name}ForCausalLM")(config)
    for name, p in made.named_parameters():  # norms' weights too
        p.data.add_(torch.randn_like(p) * (0.2 if name.endswith("conv1d.bias") else 0.05))
    return made.to(torch.bfloat16).to(device, dtype)


def mixers(model: Model, made) -> list:
    layers = (made.model if hasattr(made, "model") else made.backbone).layers
    return [getattr(layer, model.at) for layer in layers
            if type(getattr(layer, model.at, None)).__name__ == model.name + model.mixer]


def outcome(m, ids) -> dict:
    """The logits, and all gradients by parameters' names."""
    m.zero_grad()
    out = m(input_ids=ids, labels=ids, use_cache=False)
    out.loss.backward()
    names = (name.removeprefix("_orig_mod.") for name, _ in m.named_parameters())
    return {"logits": out.logits.detach(), **{name: p.grad.clone() for name, p in zip(names, m.parameters())
                                              if p.grad is not None}}


def tokens(B=2, S=70, device="cpu", seed=1):
    return torch.randint(1, 96, (B, S), generator=torch.Generator().manual_seed(seed)).to(device)


def assert_as_near(mine, peer, right):
    """Outcomes of a few batches each: mine are at most twice as far from what is right as the peer's are. Gradients of
    a hundred numbers and fewer count together with those of their kind in all layers, as the errors of few are luck."""
    pooled = {}
    for outcomes, at in ((mine, "mine"), (peer, "peer"), (right, "right")):
        for name, x in (item for outcome in outcomes for item in outcome.items()):
            kind = "norms" if "norm" in name else name.rpartition(".")[2]
            of = pooled.setdefault(name if x.numel() > 100 else kind, {"mine": [], "peer": [], "right": []})
            of[at].append(x.double().flatten())
    for name, of in pooled.items():
        found, theirs, wanted = (torch.cat(of[at]) for at in ("mine", "peer", "right"))
        assert error(found, wanted) <= 2 * error(theirs, wanted), name
