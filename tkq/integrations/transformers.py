"""transformers on tkq (transformers >= 5.17): its attention, and its models' norms, rotary embeddings, MLPs and losses.

    import tkq.integrations.transformers as tkq_transformers

    model = AutoModelForCausalLM.from_config(config, attn_implementation="tkq", dtype=torch.bfloat16)
    print(tkq_transformers.patch(model))

The import registers "tkq" among transformers' attentions (AttentionInterface and AttentionMaskInterface). It takes
bf16 and fp16: causal and full attention, windows, softcap, padding (sequences of any lengths, without what is padded),
sequences packed into one row, caches that grow, and static caches whose length stays on the GPU, so that a step can be
a CUDA graph. Other masks and types go to transformers' "sdpa"; dropout is refused.

"tkq_unmasked" is causal (or full) attention for models that need no mask, as in training on sequences of one length:
for calls without attention_mask, without position_ids (or with cu_seq_lens_q and so on, of packed sequences) and
without keys from before. It has no mask and does not look for packed sequences, for which "tkq" waits for the GPU in
every call: the GPU then has nothing to do until the host has caught up. Another call is refused where that can be
seen: caches, chunks and position_ids of several rows in every model; attention_mask and any position_ids in models
whose loss is patched, see `patch`. Of others transformers IGNORES attention_mask there: take "tkq" for them.

`patch` changes modules of a model by their class, and nothing else of the process; see `transformers_families.FAMILIES`
for what it knows. Parameters and buffers stay the same objects with the same names: a state dict, an optimizer and
`save_pretrained` see no difference. `unpatch` undoes it.
"""
from collections import Counter
from dataclasses import dataclass, field

try:
    from transformers import AttentionInterface, AttentionMaskInterface
except ImportError as problem:
    raise ImportError("tkq.integrations.transformers needs transformers >= 5.17: pip install 'transformers>=5.17'"
                      ) from problem
import torch
from torch import nn

from ..runtime.call import check
from . import transformers_modules as modules
from .transformers_attention import attention_forward, make_mask, unmasked_forward

__all__ = ["Report", "patch", "unpatch"]

AttentionInterface.register("tkq", attention_forward)
AttentionInterface.register("tkq_unmasked", unmasked_forward)
AttentionMaskInterface.register("tkq", make_mask)


@dataclass
class Report:
    """What `patch` did. replaced: how many modules of each class. left: why modules of classes that it knows were left
    as they are, and how many."""

    replaced: Counter = field(default_factory=Counter)
    left: Counter = field(default_factory=Counter)

    def __str__(self):
        lines = [f"{count:4d} x {name}" for name, count in self.replaced.items()] or ["   nothing that tkq knows"]
        return "\n".join(["replaced:", *lines] + (["left:"] + [
            f"{count:4d} x {why}" for why, count in self.left.items()] if self.left else []))


def __getattr__(name):
    """The classes of patched modules, which pickle looks for here, by their names, in another process, too."""
    found = modules.named(name)
    if found is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return found


def patch(model: nn.Module, *, linear: str | None = None, keep_weight: bool = True, loss: bool = True) -> Report:
    """Let the modules of a model of transformers run on tkq's kernels, where tkq knows their class: norms, rotary
    embedding (in attention layers), gated MLPs, the additions around norms (in decoder layers), and the loss.

    Args:
        model: of Llama, Mistral, Qwen 2, Qwen 3, Gemma 2, Gemma 3, Phi-3 and Phi-4 (Phi3), GLM-4 (Glm, Glm4), OLMo
            (Olmo, Olmo2, Olmo3), Granite; Qwen3-MoE, DeepSeek-V3 and gpt-oss, whose experts and routers stay, Gemma 4,
            whose additions around norms stay; Qwen3-Next and Kimi Linear, whose linear attention then runs on
            `tkq.gated_delta_rule`, Mamba-2, Bamba, Granite 4 (GraniteMoeHybrid) and Nemotron-H, whose mixers run on
            `tkq.mamba2_ssd`, and whose losses stay; or anything that has such modules in it. Changed in place. How
            attention itself is computed stays as it is: ``model.set_attn_implementation("tkq")``.
        linear: what linear layers of decoder layers become: None, as they are; "tkq", `tkq.nn.Linear`; "fp8",
            "fp8_block" and "fp8_tensor", `tkq.nn.Fp8Linear` with scales "row", "1x128", and "tensor" with gradients
            in float8_e5m2 (those with sizes that are multiples of 16).
        keep_weight: of float8 layers, see `tkq.nn.Fp8Linear`: False for weights that FSDP shards.
        loss: with labels, and in training mode, the loss comes from `tkq.linear_cross_entropy` in bf16 and fp16, and
            the output's logits are None: they are never whole in memory. False: logits and loss as before.

    Returns:
        A `Report`. What it does not know it leaves alone; what it has patched before too, but for linear layers that
        ``linear`` now says otherwise of: they change once more. ``linear=None`` and ``loss=False`` undo nothing.

    Raises:
        ValueError: another ``linear``; keep_weight=False without float8 layers.
        TypeError: a model that is no module; a loss or keep_weight that is no bool.

    What is fused is what patch has replaced. Modules of other classes in its place (adapters, norms of your own), and
    modules with hooks or a forward of their own, before or after patch, are called as they are. (Hooks for all modules,
    `torch.nn.modules.module.register_module_forward_hook` and such, are called for modules that are not fused.) Modules
    come from a model's classes, not copies of them: a state dict is the same before and after. A patched model can be
    pickled; where it is loaded, there is tkq.
    """
    if linear not in modules.LINEARS:
        raise ValueError(f"patch: linear: got {linear!r}, allowed are {', '.join(map(repr, modules.LINEARS))}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"patch: model: got {type(model).__name__}, expected a torch.nn.Module")
    check.flag("patch: loss", loss)
    check.flag("patch: keep_weight", keep_weight)
    if not (keep_weight or (linear or "").startswith("fp8")):
        raise ValueError(f"patch: keep_weight=False is for layers in float8, linear is {linear!r}")
    known, report = modules.known(), Report()
    for module in model.modules():
        found = known.get(modules.original(type(module)) or type(module))
        if found is None:
            continue
        if type(module) in known and found.kind.forward is not None and (loss or not found.is_loss):
            _replace(module, found, report)
        if linear is not None and found.is_layer:  # of layers that an earlier call has replaced, too
            modules.replace_linears(module, linear, keep_weight, report)
    return report


def _replace(module, found, report):
    why = found.why_not(module)
    if why is None and any(x.dtype is torch.float64 for x in module.parameters()):
        why = "its parameters are of torch.float64"
    if why is None:
        report.replaced[type(module).__name__] += 1
        module.__class__ = found.subclass(type(module))
    else:
        report.left[f"{type(module).__name__}: {why}"] += 1


def unpatch(model: nn.Module) -> None:
    """Undo `patch`, all of it."""
    for module in model.modules():
        original = modules.original(type(module))
        if original is not None:
            module.__class__ = original
            modules.clear(module)
