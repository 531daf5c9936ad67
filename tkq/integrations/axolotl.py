"""axolotl's models on tkq: a plug-in, named in its config (axolotl 0.19).

    plugins:
      - tkq.integrations.axolotl.TkqPlugin

It calls `tkq.integrations.transformers.patch` on the model that axolotl has built, before adapters are put into it; its
loss stays axolotl's. Beside it no option that rewrites the same modules goes: those of Liger, and kernels for LoRA. How
attention is computed stays as the config says.
"""
import logging

from axolotl.integrations.base import BasePlugin

from .transformers import patch

REWRITE = ("liger_rope", "liger_rms_norm", "liger_glu_activation", "lora_mlp_kernel", "lora_qkv_kernel",
           "lora_o_kernel")
_log = logging.getLogger("tkq")


class TkqPlugin(BasePlugin):
    def post_model_build(self, cfg, model):
        """
        Raises:
            ValueError: an option that rewrites modules that tkq replaces.
        """
        given = [name for name in REWRITE if cfg.get(name)]
        if given:
            raise ValueError(f"tkq.integrations.axolotl: got {', '.join(given)}, which rewrite modules that tkq "
                             "replaces; allowed is one or the other")
        _log.info("tkq.integrations.axolotl: %s", patch(model, loss=False))
