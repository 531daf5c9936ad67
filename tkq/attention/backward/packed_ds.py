"""Flash attention backward in bf16 with fewer instructions for each score: their power is the tensor cores'."""

from tkq.attention.backward import dkv
from tkq.attention.backward.config import BackwardConfig
from tkq.attention.backward.dkv import AttentionBackward, ChainedBackward
from tkq.attention.backward.dq_first_store import FirstStores
from tkq.attention.backward.dq_first_store_config import FirstConfig
from tkq.attention.backward.fuse_preprocess import Seamless
from tkq.attention.backward.fuse_preprocess_config import SeamlessConfig
from tkq.attention.backward.gqa import GroupedBackward
from tkq.attention.backward.gqa_config import GroupedConfig
from tkq.attention.backward.math import Pairs
from tkq.attention.backward.spec import BackwardSpec


class PairsBackward(Pairs, AttentionBackward):
    """Blocks that have the keys, and add to dQ."""


class PairsChained(Pairs, ChainedBackward):
    """With dQ that goes from block to block."""


class PairsGrouped(Pairs, GroupedBackward):
    """For query heads that share a K/V head."""


class PairsFirst(Pairs, FirstStores):
    """Likewise, without zeroes."""


class PairsSeamless(Pairs, Seamless):
    """Without seams."""


def _kind(config):
    for kind, of in ((PairsFirst, FirstConfig), (PairsGrouped, GroupedConfig), (PairsSeamless, SeamlessConfig)):
        if isinstance(config, of):
            return kind
    return PairsChained if config.chain else PairsBackward


def build(spec: BackwardSpec, config: BackwardConfig):
    """As ``backward.build``."""
    return _kind(config)(spec, config), dkv.build(spec, config)[1]
