"""Flash attention backward in bf16 with fewer instructions for each score: their power is the tensor cores'."""

from tkq.attention.backward import dkv
from tkq.attention.backward.config import BackwardConfig
from tkq.attention.backward.dkv import AttentionBackward, DqSerialBackward
from tkq.attention.backward.dq_first_store import DqFirstStore
from tkq.attention.backward.dq_first_store_config import DqFirstStoreConfig
from tkq.attention.backward.fuse_preprocess import FusePreprocess
from tkq.attention.backward.fuse_preprocess_config import FusePreprocessConfig
from tkq.attention.backward.gqa import GqaBackward
from tkq.attention.backward.gqa_config import GqaConfig
from tkq.attention.backward.math import PackedDs
from tkq.attention.backward.spec import BackwardSpec


class PackedDsBackward(PackedDs, AttentionBackward):
    """Blocks that have the keys, and add to dQ."""


class PackedDsSerial(PackedDs, DqSerialBackward):
    """With dQ that goes from block to block."""


class PackedDsGqa(PackedDs, GqaBackward):
    """For query heads that share a K/V head."""


class PackedDsFirstStore(PackedDs, DqFirstStore):
    """Likewise, without zeroes."""


class PackedDsFusePreprocess(PackedDs, FusePreprocess):
    """With a fused preprocess."""


def _kind(config):
    for kind, of in ((PackedDsFirstStore, DqFirstStoreConfig), (PackedDsGqa, GqaConfig),
                     (PackedDsFusePreprocess, FusePreprocessConfig)):
        if isinstance(config, of):
            return kind
    return PackedDsSerial if config.dq_serial else PackedDsBackward


def build(spec: BackwardSpec, config: BackwardConfig):
    """As ``backward.build``."""
    return _kind(config)(spec, config), dkv.build(spec, config)[1]
