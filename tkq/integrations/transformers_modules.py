"""Modules of transformers' models on tkq: subclasses that differ in `forward` alone, and the table of what they are of.
"""
import contextlib
import functools
import importlib
import inspect
import math
import re
import sys
from collections.abc import Callable
from typing import NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from .. import layernorm, linear_cross_entropy, rmsnorm
from . import transformers_hybrid as hybrid
from . import transformers_kimi as kimi
from . import transformers_mamba as mamba
from . import transformers_mlps as mlps
from .linears import changed
from .transformers_attention import refuse_unmasked
from .transformers_families import FAMILIES, Family
from .transformers_heads import IS_CACHE, attention_forward, clips, latent_forward, shared_forward

_CACHE = "cache" if IS_CACHE else "past_key_values"
OLMO_EPS = 1e-5  # of its norms without weights, written out there
LINEARS = (None, "tkq", "fp8", "fp8_block", "fp8_tensor")


# ---- forwards --------------------------------------------------------------------------------------------------------


def norm_forward(family, cls):
    def forward(self, hidden_states):
        return _norm(family, self, hidden_states)

    return forward


def _norm(family, norm, x, residual=None, prenorm=False):
    """In the dtype of the model's own norm: that of x + residual, promoted with the weight's, but where the family's
    norms keep their input's."""
    x = x if x.stride(-1) == 1 else x.contiguous()  # behind a convolution along time
    weight, more = getattr(norm, "weight", None), dict(residual=residual, prenorm=prenorm)
    total = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    out = total if weight is None or family.keeps_dtype else torch.promote_types(total, weight.dtype)
    if out != x.dtype:
        more["out_dtype"] = out
    if prenorm and residual is not None and total != residual.dtype:
        more["residual_dtype"] = total
    if family.kinds == "olmo":
        return layernorm(x, eps=OLMO_EPS, **more)
    return rmsnorm(x, weight, eps=getattr(norm, family.norm), weight_offset=family.offset, **more)


def layer_forward(family, cls):
    """The additions go with the norms before which they stand; the last one goes with the MLP's last product, where
    nothing stands between."""
    before, _, second, last = family.norms

    def forward(self, hidden_states, **kwargs):
        h, residual = _normed(before and getattr(self, before), hidden_states)
        h, _ = self.self_attn(hidden_states=h, **kwargs)
        h, residual = _normed(second and getattr(self, second), _behind(self, family, 0, h), residual)
        added = last is family.scale is None and _idle(self, family.dropouts[1])
        if added and _own(self.mlp, "MLP") is not None:
            return self.mlp(h, residual)
        h = self.mlp(h)
        return residual + _behind(self, family, 1, h[0] if isinstance(h, tuple) else h)

    return forward


def _behind(layer, family, place, h):
    """What is done to the result of a layer's attention (place 0) or MLP (1) before it is added."""
    for name in (family.norms[2 * place + 1], family.dropouts[place]):
        h = h if name is None else getattr(layer, name)(h)
    return h if family.scale is None else h * getattr(layer, family.scale)


def _idle(layer, name):
    """Does a layer's dropout do nothing, in training too?"""
    if name is None:
        return True
    module = getattr(layer, name)
    return type(module) is nn.Dropout and module.p == 0 and not changed(module)


def hybrid_layer_forward(family, cls):
    """As `layer_forward`, with the mixer that the layer has; an MLP may be one of experts."""
    mixer = getattr(sys.modules[cls.__module__], cls.__name__.replace("DecoderLayer", "GatedDeltaNet"))
    cache_name = hybrid.cache_argument(mixer)

    def forward(self, hidden_states, **kwargs):
        h, residual = _normed(self.input_layernorm, hidden_states)
        if self.block_type == "linear_attention":
            given = {name: x for name, x in kwargs.items() if name not in ("position_embeddings", "position_ids")}
            given[cache_name] = given.pop(_CACHE, None)
            h = self.linear_attn(hidden_states=h, **given)
        else:
            h, _ = self.self_attn(hidden_states=h, **kwargs)
        h, residual = _normed(self.post_attention_layernorm, h, residual)
        if _own(self.mlp, "MLP") is not None:
            return self.mlp(h, residual)
        h = self.mlp(h)
        return residual + (h[0] if isinstance(h, tuple) else h)

    return forward


def _normed(norm, x, residual=None):
    """(the norm of x + residual, the sum), in one kernel where nothing but patch has changed what the norm is."""
    family = None if norm is None else _own(norm, "RMSNorm", "LayerNorm")
    if family is None:
        total = x if residual is None else residual + x
        return total if norm is None else norm(total), total
    return _norm(family, norm, x, residual=residual, prenorm=True)


def _own(module, *endings):
    """The family of a module of patch's, of a kind, a call of which runs the forward given here and no more; else None.
    Asked in each call: hooks may come later."""
    family = next((_families[ending][type(module)] for ending in endings if type(module) in _families[ending]), None)
    return None if family is None or changed(module) else family


def loss_forward(family, cls):
    made = getattr(sys.modules[cls.__module__], family.output, CausalLMOutputWithPast)  # as DeepSeek's before 5.24
    names = tuple(name for name, given in inspect.signature(cls.forward).parameters.items()
                  if given.kind is given.POSITIONAL_OR_KEYWORD)[1:]  # without self

    @functools.wraps(cls.forward)  # generate and Trainer ask inspect for the parameters
    def forward(self, *args, **kwargs):
        if args:
            if len(args) > len(names) or any(name in kwargs for name in names[:len(args)]):
                return cls.forward(self, *args, **kwargs)  # which says what is wrong
            kwargs.update(zip(names, args))
        refuse_unmasked(self.config, **kwargs)
        keep = kwargs.get("logits_to_keep", 0)
        if (kwargs.get("labels") is not None and self.training and type(keep) is int and keep == 0 and _can_fuse(self)
                and not _of_routers(self.config, **kwargs)):
            return _without_logits(self, made, **kwargs)
        return cls.forward(self, **kwargs)

    return forward


@can_return_tuple
def _without_logits(model, made, labels, logits_to_keep=0, **kwargs):
    out = model.model(**kwargs)
    loss = _loss(model, out.last_hidden_state, labels, **kwargs)
    also = {name: out.get(name) for name in made.__dataclass_fields__ if name not in ("loss", "logits")}
    return made(loss=loss, **also)


def _of_routers(config, output_router_logits=None, **_):
    """Is there to be a loss of the routers, too?"""
    return getattr(config, "output_router_logits", False) if output_router_logits is None else output_router_logits


def _can_fuse(model):
    """Is the head a plain linear layer of a type that the kernel takes, and the loss transformers' usual one?"""
    head, loss = model.lm_head, model.loss_function
    return (type(head) is nn.Linear and head.bias is None and head.weight.dtype in (torch.bfloat16, torch.float16)
            and head.in_features % 8 == 0 and not changed(head) and getattr(loss, "__name__", "") == "ForCausalLMLoss")


def _loss(model, hidden, labels, num_items_in_batch=None, ignore_index=-100, shift_labels=None, **_):
    """As transformers' ForCausalLMLoss, whose arguments these are: token i predicts token i + 1."""
    target = F.pad(labels, (0, 1), value=ignore_index)[..., 1:] if shift_labels is None else shift_labels
    scaling = getattr(model.config, "logits_scaling", None)
    loss = linear_cross_entropy(
        hidden if scaling is None else hidden / scaling, model.lm_head.weight, target.contiguous().to(hidden.device),
        ignore_index=ignore_index, reduction="mean" if num_items_in_batch is None else "sum",
        softcap=getattr(model.config, "final_logit_softcapping", None))
    if num_items_in_batch is None:
        return loss
    return loss / (num_items_in_batch.to(loss.device) if isinstance(num_items_in_batch, torch.Tensor)
                   else num_items_in_batch)


def scaling_refuses(module):
    """Why a loss stays as it is: hidden states are divided instead of logits, which rounds none by a power of two."""
    scaling = getattr(module.config, "logits_scaling", None)
    return None if scaling is None or math.frexp(scaling)[0] == 0.5 else f"logits_scaling {scaling}, no power of 2"


# ---- what is replaced by what ----------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """Of modules: how their classes' names end, what makes their forward, and what may speak against a module."""

    ending: str
    forward: Optional[Callable]  # None: only linear layers in it may be replaced
    why_not: Callable = lambda module: None


_NORM, _LAYER = Kind("RMSNorm", norm_forward), Kind("DecoderLayer", layer_forward)
_MLP, _PACKED_MLP = (Kind("MLP", forward, mlps.refuses) for forward in (mlps.gated_forward, mlps.packed_forward))
_ATTENTION, _LOSS = Kind("Attention", attention_forward), Kind("ForCausalLM", loss_forward, scaling_refuses)
KINDS = {
    "plain": (_NORM, _MLP, _ATTENTION, _LAYER, _LOSS),
    "packed": (_NORM, _PACKED_MLP, _ATTENTION, _LAYER, _LOSS),
    "experts": (_NORM, _ATTENTION, _LAYER, _LOSS),
    "latent": (_NORM, _MLP, Kind("Attention", latent_forward), _LAYER, _LOSS),
    "olmo": (Kind("LayerNorm", norm_forward), _MLP, Kind("Attention", attention_forward, clips), _LAYER, _LOSS),
    "gemma4": (_NORM, Kind("TextMLP", mlps.gated_forward, mlps.refuses), Kind("TextAttention", shared_forward),
               Kind("TextDecoderLayer", None), _LOSS),
    "hybrid": (_NORM, _MLP, _ATTENTION, Kind("RMSNormGated", hybrid.gated_norm_forward),
               Kind("GatedDeltaNet", hybrid.delta_forward, hybrid.delta_refuses),
               Kind("DecoderLayer", hybrid_layer_forward)),
    "kimi": (_NORM, _MLP, Kind("DeltaAttention", kimi.delta_forward, kimi.refuses), Kind("DecoderLayer", None)),
    "mamba2": (_NORM, Kind("Mixer", mamba.mixer_forward, mamba.refuses), Kind("Block", None)),
    "bamba": (_NORM, _MLP, Kind("Mixer", mamba.mixer_forward, mamba.refuses), Kind("DecoderLayer", None)),
    "granite_hybrid": (_NORM, Kind("MLP", mlps.granite_forward, mlps.refuses),
                       Kind("MambaLayer", mamba.mixer_forward, mamba.refuses), Kind("DecoderLayer", None)),
    "nemotron": (_NORM, Kind("Mamba2Mixer", mamba.mixer_forward, mamba.refuses), Kind("Block", None)),
}


def kinds_of(family):
    """What patch knows of a family's modules."""
    return KINDS[family.kinds]


class Known(NamedTuple):
    """A class of transformers that tkq has a subclass for."""

    family: Family
    kind: Kind

    @property
    def is_loss(self):
        return self.kind.ending == "ForCausalLM"

    @property
    def is_layer(self):
        return self.kind.ending.endswith(("DecoderLayer", "Block"))

    def why_not(self, module) -> Optional[str]:
        return self.kind.why_not(module)

    def subclass(self, cls):
        made = _subclass(cls, self.kind.forward(self.family, cls))
        _families[self.kind.ending][made] = self.family
        return made


# of each kind: the class made -> its family
_families: dict = {kind.ending: {} for kinds in KINDS.values() for kind in kinds}
_subclasses: dict = {}  # (class, what it becomes) -> the one made for it: as many as the tables here give
_originals: dict = {}  # the class made -> the one it was made for


HOME = f"{__package__}.transformers"  # where pickle finds what is made here, by `named`


def _subclass(cls, forward, base=None):
    """A class of cls's name for its modules, made once. base: what it is derived from, cls where not given."""
    base = base or cls
    made = _subclasses.get((cls, base))
    if made is None:
        members = {"__module__": HOME, "__doc__": cls.__doc__, **({"forward": forward} if forward else {})}
        made = _subclasses[cls, base] = type(cls.__name__, (base,), members)
        made.__qualname__ = cls.__name__ if base is cls else f"{cls.__name__}_{base.__name__}"
        _originals[made] = cls
    return made


def named(name: str):
    """The class made, or now to be made, that has this __qualname__; None for other names."""
    if name in ("Linear_Linear", "Linear_Fp8Linear"):
        from .. import nn as tkq_nn
        return _subclass(nn.Linear, None, getattr(tkq_nn, name.partition("_")[2]))
    if name in (family + kind.ending for family, at in FAMILIES.items() for kind in kinds_of(at)
                if kind.forward):  # else no import
        return next((found.subclass(cls) for cls, found in known().items() if cls.__name__ == name), None)
    return None


def original(cls):
    """The class that a patched module had; None for a class that is not patch's."""
    return _originals.get(cls)


@functools.cache
def known() -> dict:
    """The classes of this version of transformers that are in the table."""
    found = {}
    for name, family in FAMILIES.items():
        module = _module(name)
        for kind in kinds_of(family):
            cls = getattr(module, name + kind.ending, None)
            if cls is not None:
                found[cls] = Known(family, kind)
    return found


def _module(name):
    """That of a model, qwen3_next of Qwen3Next or granitemoehybrid of GraniteMoeHybrid; None in versions without it."""
    for written in (re.sub("(?<=[a-z0-9])(?=[A-Z])", "_", name), name):
        with contextlib.suppress(ImportError):
            return importlib.import_module("transformers.models.{0}.modeling_{0}".format(written.lower()))
    return None


# ---- linear layers ---------------------------------------------------------------------------------------------------


def replace_linears(layer, what, keep_weight, report):
    """nn.Linear in a layer, by tkq.nn's; what an earlier call made of it, too."""
    from .. import nn as tkq_nn
    from ..quantize.linear import E4M3, E5M2, Recipe

    fp8 = {"fp8": Recipe("row", E4M3, keep_weight), "fp8_block": Recipe("1x128", E4M3, keep_weight),
           "fp8_tensor": Recipe("tensor", E5M2, keep_weight)}.get(what)
    made = _subclass(nn.Linear, None, tkq_nn.Linear if fp8 is None else tkq_nn.Fp8Linear)
    routers = {id(x) for name, of in layer.named_modules() if name.split(".")[-1] == "router" for x in of.modules()}
    for module in layer.modules():
        if id(module) in routers:  # which experts a token has is decided as it was
            continue
        if nn.Linear not in (type(module), original(type(module))):
            continue
        if type(module) is made and getattr(module, "recipe", None) == fp8:
            continue
        why = _refuses(module, what)
        if why is not None:
            report.left[f"Linear: {why}"] += 1
            continue
        module.__class__ = nn.Linear
        clear(module)
        if fp8 is not None:
            module.recipe = fp8
        module.__class__ = made
        report.replaced["Linear"] += 1


def _refuses(linear, what):
    if what.startswith("fp8"):
        odd = linear.in_features % 16 or linear.out_features % 16
        return "sizes that are no multiples of 16" if odd else None
    if linear.weight.dtype not in (torch.bfloat16, torch.float16):
        return f"a weight of {linear.weight.dtype}"
    return "in_features that are no multiple of 8" if linear.in_features % 8 else None


def clear(module):
    """What `replace_linears` has put into a module."""
    if type(module) is nn.Linear:
        module.__dict__.pop("recipe", None)
