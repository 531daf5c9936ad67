"""As much of vLLM 0.33's interface of attention backends as `tkq.integrations.vllm_backend` uses, without vLLM."""
import enum
import types
from dataclasses import dataclass

import torch


class AttentionBackend:
    pass


class AttentionImpl:
    pass


class AttentionMetadata:
    pass


class AttentionType(str, enum.Enum):
    DECODER = "decoder"
    ENCODER = "encoder"


class AttentionCGSupport(enum.Enum):
    UNIFORM_BATCH = 2


class MultipleOf:
    def __init__(self, base):
        self.base = base


class AttentionMetadataBuilder:
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec, self.layer_names, self.vllm_config, self.device = (
            kv_cache_spec, layer_names, vllm_config, device)

    def _init_reorder_batch_threshold(self, threshold, supports_spec_as_decode=False):
        drafts = self.vllm_config.speculative_tokens if supports_spec_as_decode else 0
        self.reorder_batch_threshold = max(threshold, 1 + drafts)


@dataclass
class Common:
    """vLLM's CommonAttentionMetadata: the fields that are read."""

    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool = True

    @property
    def query_start_loc(self):
        """On the device."""
        return self.query_start_loc_cpu


def modules(registered: dict, batch_invariant=False) -> dict:
    """For sys.modules. registered: gets the path of each backend's class."""
    names = ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends", "vllm.v1.attention.backend",
             "vllm.v1.attention.backends.registry")
    found = {name: types.ModuleType(name) for name in names}
    found["vllm"].envs = types.SimpleNamespace(VLLM_BATCH_INVARIANT=batch_invariant)
    for part in (AttentionBackend, AttentionImpl, AttentionMetadata, AttentionType, AttentionCGSupport, MultipleOf,
                 AttentionMetadataBuilder):
        setattr(found["vllm.v1.attention.backend"], part.__name__, part)
    found["vllm.v1.attention.backends.registry"].register_backend = registered.__setitem__
    return found
