"""What models of transformers `patch` knows, and what differs between them."""
from typing import NamedTuple, Optional

# A decoder layer's norms, by the names of its attributes: before attention, behind it, before the MLP, behind it.
_BEFORE = "input_layernorm", None, "post_attention_layernorm", None
_FOUR = "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
_FOUR_OF_GLM = "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"
_BEHIND = None, "post_attention_layernorm", None, "post_feedforward_layernorm"


class Family(NamedTuple):
    """What differs between models.

    norm: the name of a norm's eps. offset: what its weight is added to. norms: of a decoder layer, four names, None
    where there is none. head_norms: queries and keys are normalised, "each" head or "all" of a token's together.
    options: what the layer gives its attention, by the names of its attributes. kinds: which of
    `transformers_modules.KINDS` its modules are of. hybrid: attention has a gate. rotary: how angles lie in the tables
    and pairs in a head: "halves" (both halves of a table are equal), "interleaved" (the same, neighbours are a pair),
    "one half". keeps_dtype: norms return their input's dtype, whatever their weight's is. output: of the class
    with the loss, the dataclass. dropouts: behind attention and MLP. scale: what both are multiplied by before they are
    added, by the name of the layer's attribute."""

    norm: str = "variance_epsilon"
    offset: float = 0.0
    keeps_dtype: bool = False
    norms: tuple = _BEFORE
    head_norms: str = ""
    options: dict = {}  # noqa: RUF012  never written to
    kinds: str = "plain"
    hybrid: bool = False
    rotary: str = "halves"
    output: str = "CausalLMOutputWithPast"
    dropouts: tuple = (None, None)
    scale: Optional[str] = None


_WINDOW = {"sliding_window": "sliding_window"}
_OF_THE_CONFIG = {"sliding_window": "config.sliding_window"}
_GEMMA = dict(norm="eps", offset=1.0, keeps_dtype=True, norms=_FOUR)
_EXPERTS = dict(output="MoeCausalLMOutputWithPast")
# by the module of transformers.models, which is the beginning of its classes' names too
FAMILIES = {
    "Llama": Family(),
    "Mistral": Family(options=_OF_THE_CONFIG),
    "Qwen2": Family(options=_WINDOW),
    "Qwen3": Family(head_norms="each", options=_WINDOW),
    "Qwen3Moe": Family(head_norms="each", options=_WINDOW, **_EXPERTS),
    "Gemma2": Family(**_GEMMA, options={**_WINDOW, "softcap": "attn_logit_softcapping"}),
    "Gemma3": Family(**_GEMMA, head_norms="each", options=_WINDOW),
    "Gemma4": Family("eps", keeps_dtype=True, options=_WINDOW, kinds="gemma4", output="Gemma4CausalLMOutputWithPast"),
    "Phi3": Family(options=_OF_THE_CONFIG, kinds="packed", dropouts=("resid_attn_dropout", "resid_mlp_dropout")),
    "Glm": Family(kinds="packed", rotary="interleaved"),
    "Glm4": Family(norms=_FOUR_OF_GLM, kinds="packed", rotary="interleaved"),
    "DeepseekV3": Family(kinds="latent", **_EXPERTS),
    "GptOss": Family(keeps_dtype=True, options={**_WINDOW, "s_aux": "sinks"}, kinds="experts", rotary="one half",
                     **_EXPERTS),
    "Olmo": Family(keeps_dtype=True, kinds="olmo"),
    "Olmo2": Family(keeps_dtype=True, norms=_BEHIND, head_norms="all"),
    "Olmo3": Family(keeps_dtype=True, norms=_BEHIND, head_norms="all", options=_WINDOW),
    "Granite": Family(scale="residual_multiplier"),
    "Qwen3Next": Family("eps", 1.0, keeps_dtype=True, head_norms="each", kinds="hybrid", hybrid=True),
    "KimiLinear": Family(kinds="kimi"),
    "Mamba2": Family(kinds="mamba2"),
    "Bamba": Family(kinds="bamba"),
    "GraniteMoeHybrid": Family(kinds="granite_hybrid"),
    "NemotronH": Family(keeps_dtype=True, kinds="nemotron"),
}
