"""attn_implementation="tkq" of transformers: from its masks to what tkq's attention takes, and the call.

A model of transformers makes its mask once, by the function registered for its attention, and hands it to each layer.
Here it is one of three:

    None      queries are the last of the keys; causal, or not, as the layer says
    a Layout  sequences of other lengths than the tensor's: padding, sequences packed into one row, a cache that is
              longer than what has been written to it
    a tensor  (B, 1, Sq, Sk), anything else: the layer's call goes to transformers' "sdpa"
"""
from typing import NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from .. import flash_attn, flash_attn_varlen
from ..runtime.call.check import under_autocast
from . import transformers_packed as packed_rows

DTYPES = (torch.bfloat16, torch.float16)


class Cached(NamedTuple):
    """Queries against a cache of which only the first keys of each sequence are in use: how many is known on the GPU
    alone. Each K/V head of each sequence is a sequence of its own, so that a cache (B, Hk, S, D) is read in place.

    heads: of keys, that cu_q, cu_k and used are for. first, last: what they are made of, see `cached`."""

    heads: int
    cu_q: Tensor
    cu_k: Tensor
    used: Tensor
    first: Tensor
    last: object


class Layout(NamedTuple):
    """Where sequences lie in (B, S) tokens.

    keys: how many keys of the cache, the first ones, are in use; None: all.
    cu: (sequences + 1,) int32, where sequences begin among the tokens, which are in a row of B * S. order, back: the
    tokens are brought into this order before and back after; None: they are in order.
    cached: instead of cu. padding: some of its sequences begin behind padding, of which positions say nothing.

    ndim, contiguous: transformers asks an attention_mask for them: generate has the masks of static caches made ahead,
    and hands them to the model, which calls `make_mask` with what it is handed. They say that there is nothing to
    convert, and (transformers 5.23) nothing to lay out anew."""

    ndim = 4
    keys: Optional[int] = None
    cu: Optional[Tensor] = None
    order: Optional[Tensor] = None
    back: Optional[Tensor] = None
    cached: Optional[Cached] = None
    padding: bool = False

    def contiguous(self) -> "Layout":
        """Itself."""
        return self


# ---- once for each call of a model: its mask ------------------------------------------------------------------------


def make_mask(batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=causal_mask_function,
              attention_mask=None, use_vmap=False, dtype=None, config=None, device="cpu", **kwargs):
    """What `transformers.masking_utils` calls to make a model's mask: see there. The limit of a window is not in it:
    the layer has it.

    Sequences packed into one row are found here by what transformers has found, and by the layers, see `_packed_by`,
    where it does not look: in a call with a cache. Under torch.compile they are not looked for: cu_seq_lens_q and so on
    say where they are.
    """
    traced = torch.compiler.is_compiling()
    if not traced:
        packed_rows.next_call()
    if isinstance(attention_mask, Layout):
        return attention_mask  # made ahead, by generate

    def as_tensor():
        mask = sdpa_mask(batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset,
                         kv_offset=kv_offset, mask_function=mask_function, attention_mask=attention_mask,
                         use_vmap=use_vmap, device=device, **kwargs)
        if not (traced or mask is None) and (attention_mask is None or (
                not _capturing(device) and bool(attention_mask.all()))):
            packed_rows.remember_mask(mask)
        return mask

    if use_vmap or not _is_16_bit(dtype, device) or not (
            _looks_causal(mask_function, config) if traced else _is_causal(mask_function)):
        return as_tensor()

    def given(layout):
        """A tensor where layers without keys of their own may get the last queries alone: Gemma 4 cuts the mask."""
        return as_tensor() if getattr(config, "num_kv_shared_layers", None) else layout

    fixed = traced or _capturing(device)  # then no value on the GPU can be asked for
    padding = _padding(attention_mask, kv_length, kv_offset)
    if padding is not None and not fixed and bool(padding.all()):
        padding = None
    used = q_offset + q_length - kv_offset  # keys
    known = isinstance(used, (int, torch.SymInt))
    if padding is None and known:
        packed = None if traced else _packed(mask_function)
        if packed is not None:
            return given(Layout(cu=packed_rows.starts(packed)))
        return None if used == kv_length else given(Layout(keys=used))
    if known and used == q_length:
        if kwargs.get("local_size") is not None and (fixed or not _one_run(padding[:, :used])):
            return as_tensor()  # a window counts what lies between, too
        return given(padded(padding[:, :used], None if used == kv_length else used))
    if padding is not None and fixed:
        return as_tensor()
    first = torch.zeros(batch_size, dtype=torch.int32, device=device)
    if padding is not None:
        first = _first(padding, used)
        if first is None:
            return as_tensor()
    return given(Layout(cached=cached(first, used, q_length, kv_length, _key_heads(config)),
                        padding=padding is not None))


def _key_heads(config):
    """Of the first layer, where layers differ."""
    if "num_key_value_heads" in (getattr(config, "per_layer_attributes", None) or ()):
        config = config.per_layer_config[0]
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def _is_16_bit(dtype, device):
    kind = torch.device(device).type
    return (torch.get_autocast_dtype(kind) if under_autocast(kind) else dtype) in DTYPES


def _capturing(device):
    return torch.device(device).type == "cuda" and torch.cuda.is_current_stream_capturing()


def _padding(mask, kv_length, kv_offset):
    """(B, kv_length) of transformers' 2-D mask, or None: True for keys that are no padding."""
    if mask is None:
        return None
    missing = kv_offset + kv_length - mask.shape[-1]
    mask = F.pad(mask, (0, missing)) if missing > 0 else mask
    return mask[:, kv_offset:kv_offset + kv_length].bool()


def _held(function, name):
    """What a function inside another one has of that one's variables."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
    return cells[name].cell_contents


def _parts(function):
    """The mask functions that one is the intersection of, those of packed sequences unwrapped."""
    name = getattr(function, "__qualname__", "")
    if name.startswith("and_masks."):
        return [part for each in _held(function, "mask_functions") for part in _parts(each)]
    if name.startswith("remap_positions_for_packed_sequence."):  # causal by positions is causal by places in a sequence
        return _parts(_held(function, "mask_function"))
    return [function]


def _is_causal(function):
    """Is a mask function causal, maybe within a window, maybe of packed sequences, and nothing else?"""
    known = ("sliding_window_overlay.", "packed_sequence_mask_function.")
    parts = _parts(function)
    return causal_mask_function in parts and all(
        part is causal_mask_function or getattr(part, "__qualname__", "").startswith(known) for part in parts)


def _looks_causal(function, config):
    """The same where a function's parts cannot be looked at: an intersection, in a model without chunks."""
    return function is causal_mask_function or (
        function.__name__ == "and_mask" and getattr(config, "attention_chunk_size", None) is None)


def _packed(function):
    """(B, S): the number of each token's sequence; None where each row is one."""
    for part in _parts(function):
        if part.__qualname__.startswith("packed_sequence_mask_function."):
            return _held(part, "packed_sequence_mask")
    return None


def padded(keep: Tensor, keys: Optional[int] = None) -> Layout:
    """Of (B, S) tokens of which only those marked True are any, wherever they are. Nothing waits for the GPU: those
    that are none are brought to the end, where they belong to no sequence."""
    order = torch.argsort((~keep).flatten().to(torch.int8), stable=True)
    counts = keep.sum(1)
    return Layout(keys, F.pad(counts.cumsum(0), (1, 0)).int(), order, torch.argsort(order))


def _one_run(keep):
    """Is what is marked in each row without a gap? Waits for the GPU."""
    begins = (keep[:, 1:] & ~keep[:, :-1]).sum(1) + keep[:, 0]
    return bool((begins <= 1).all())


def _first(padding, used):
    """(B,) int32: the first key that is no padding, where those before are and those behind, up to ``used``, are not;
    None where padding is elsewhere. Waits for the GPU."""
    place = torch.arange(padding.shape[1], device=padding.device)
    inside = place < used
    first = used - (padding & inside).sum(1)
    if not bool(((padding & inside) == (inside & (place >= first[:, None]))).all()):
        return None
    return first.int()


def cached(first: Tensor, used, q_length: int, kv_length: int, heads: int) -> Cached:
    """first: (B,) int32, of each sequence's keys; used: the number of keys up to the last, an int or a tensor. Before
    the first sequence is one of no queries, as what lies before belongs to none and cu_k begins with 0."""
    n, device, of_sequences = first.shape[0] * heads, first.device, first
    first = first.repeat_interleave(heads)
    place = torch.arange(n, dtype=torch.int32, device=device)
    cu_k = torch.cat((place[:1] * 0, place * kv_length + first, place[-1:] * 0 + n * kv_length))
    cu_q = torch.cat((place[:1] * 0, torch.arange(n + 1, dtype=torch.int32, device=device) * q_length))
    return Cached(heads, cu_q, cu_k, F.pad((used - first).to(torch.int32), (1, 0)), of_sequences, used)


# ---- in each layer ---------------------------------------------------------------------------------------------------


def attention_forward(module, query, key, value, attention_mask, scaling=None, dropout=0.0, sliding_window=None,
                      softcap=None, is_causal=None, s_aux=None, **kwargs):
    """A layer's attention, as transformers' AttentionInterface has it: query (B, H, Sq, D), key, value (B, Hk, Sk, D);
    returns (B, Sq, H, D) and None for the weights.

    Raises:
        NotImplementedError: dropout; softcap or sinks with a mask that tkq has not; position_ids of several sequences
            in a row, with keys from before or a static cache; windows, padding or packed sequences that only bf16 and
            fp16 have without a mask.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    query, key, value = _narrowed(query, key, value)
    if causal:
        attention_mask = _packed_by(kwargs, query, key, attention_mask)
    return _forward(module, query, key, value, attention_mask, scaling, dropout, sliding_window, softcap, causal, s_aux,
                    kwargs)


def _narrowed(*tensors):
    """Under autocast queries, keys and values as products there have them: float32 tables made them wider."""
    kind = tensors[0].device.type
    if not under_autocast(kind) or torch.get_autocast_dtype(kind) not in DTYPES:
        return tensors
    return [x.to(torch.get_autocast_dtype(kind)) for x in tensors]


def _packed_by(kwargs, query, key, mask):
    """The mask, or one of the sequences that position_ids show in rows of a call that was given no mask, nor padding.
    """
    if torch.compiler.is_compiling() or kwargs.get("position_ids") is None or kwargs.get("cu_seq_lens_q") is not None:
        return mask
    layout = mask if isinstance(mask, Layout) else Layout()
    given = isinstance(mask, Tensor) and not packed_rows.is_own(mask)  # by the caller, to whom positions mean no more
    if given or layout.cu is not None or layout.padding or _capturing(query.device):
        return mask
    B, _, S, _ = query.shape
    places = kwargs["position_ids"]
    cu = packed_rows.begins(places, B, S)
    if cu is None and isinstance(places, Tensor) and places.dim() == 2 and places.shape[1] > S and (
            packed_rows.begins(places, B, places.shape[1]) is not None):  # the queries are the last ones alone
        raise NotImplementedError(f'attn_implementation="tkq": position_ids {tuple(places.shape)} are of several '
                                  f"sequences in a row, allowed are those of one for {S} queries")
    if cu is None:
        return mask
    keys = key.shape[2] if layout.keys is None else layout.keys
    if keys != S or layout.cached is not None:
        raise NotImplementedError(f'attn_implementation="tkq": position_ids {tuple(places.shape)} are of several '
                                  "sequences in a row, allowed are those without keys from before and without a static "
                                  "cache")
    if query.dtype not in DTYPES or isinstance(mask, Tensor):
        return packed_rows.within(mask if isinstance(mask, Tensor) else None, cu, B, S)
    return Layout(keys=layout.keys, cu=cu)


def _forward(module, query, key, value, attention_mask, scaling, dropout, sliding_window, softcap, causal, s_aux,
             kwargs):
    """`attention_forward`, its mask final."""
    if isinstance(attention_mask, Tensor) or query.dtype not in DTYPES:
        if softcap or s_aux is not None:
            raise NotImplementedError('attn_implementation="tkq": softcap and sinks go with causal masks, windows, '
                                      'padding and packed sequences in bf16 and fp16; "eager" takes any other')
        unseen = attention_mask is None and (kwargs.get("cu_seq_lens_q") is not None or (
            sliding_window is not None and key.shape[2] > sliding_window))
        if unseen or isinstance(attention_mask, Layout):
            raise NotImplementedError(f'attn_implementation="tkq": q is {query.dtype} and has no mask; windows, padding'
                                      ' and packed sequences go without one in bf16 and fp16; "sdpa" takes others')
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling,
                                      is_causal=causal, **kwargs)
    if dropout:
        raise NotImplementedError(f'attn_implementation="tkq": dropout is {dropout}, tkq has none; set '
                                  'attention_dropout = 0 or take "sdpa"')
    layout = _given(kwargs) if attention_mask is None else attention_mask
    left = None if sliding_window is None else sliding_window - 1
    options = dict(causal=causal, softmax_scale=scaling, window_size=(left, None if causal else left),
                   softcap=softcap or 0.0, sinks=s_aux)
    if layout is None:
        return flash_attn(*_by_tokens(query, key, value), **options), None
    if layout.cached is not None:
        return _on_cache(query, key, value, layout.cached, options), None
    if layout.keys is not None:
        key, value = key[:, :, :layout.keys], value[:, :, :layout.keys]
    if layout.cu is None:
        return flash_attn(*_by_tokens(query, key, value), **options), None
    return _in_a_row(query, key, value, layout, options), None


UNMASKED = "tkq_unmasked"


def unmasked_forward(module, query, key, value, attention_mask, **options):
    """`attention_forward` of models for which transformers makes no mask.

    Raises:
        NotImplementedError: keys of a cache, of which a mask would say how many are in use; attention by chunks, which
            is what its masks say; position_ids of several rows, which may be packed; what ``attention_forward`` raises.
    """
    if query.shape[2] != key.shape[2] or getattr(module.config, "attention_chunk_size", None) is not None:
        raise _needs_a_mask("a cache or chunks")
    places = options.get("position_ids")  # transformers' own are one row
    if (attention_mask is None and options.get("cu_seq_lens_q") is None and places is not None and places.dim() == 2
            and places.shape[0] > 1):
        raise _needs_a_mask(f"position_ids {tuple(places.shape)}")
    return _unmasked(module, query, key, value, attention_mask, **options)


def _unmasked(module, query, key, value, attention_mask, scaling=None, dropout=0.0, sliding_window=None, softcap=None,
              is_causal=None, s_aux=None, **kwargs):
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    query, key, value = _narrowed(query, key, value)
    return _forward(module, query, key, value, attention_mask, scaling, dropout, sliding_window, softcap, causal, s_aux,
                    kwargs)


def refuse_unmasked(config, attention_mask=None, position_ids=None, cu_seq_lens_q=None, **_):
    """Of a model's call: what transformers drops for "tkq_unmasked" before any layer sees it, but for 4-D masks."""
    if config._attn_implementation != UNMASKED:
        return
    if attention_mask is not None and getattr(attention_mask, "ndim", 2) != 4:
        raise _needs_a_mask("attention_mask")
    if position_ids is not None and cu_seq_lens_q is None:
        raise _needs_a_mask("position_ids")


def _needs_a_mask(what):
    return NotImplementedError(f'attn_implementation="{UNMASKED}": got {what}, allowed are calls without '
                               'attention_mask, without position_ids (or with cu_seq_lens_q) and without keys from '
                               'before; "tkq" has them')


def _given(kwargs):
    """A Layout of sequences that the caller says where to find, by the names that transformers has for it."""
    cu = kwargs.get("cu_seq_lens_q")
    return None if cu is None else Layout(cu=cu.int())


def _by_tokens(*tensors):
    """(B, H, S, D) to (B, S, H, D)."""
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in (x.transpose(1, 2) for x in tensors))


def _in_a_row(query, key, value, layout, options):
    B, H, S, _ = query.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    if layout.order is not None:
        q, k, v = (x.index_select(0, layout.order) for x in (q, k, v))
    o = flash_attn_varlen(q, k, v, layout.cu, layout.cu, S, S, **options)
    if layout.back is not None:
        o = o.index_select(0, layout.back)
    return o.view(B, S, H, -1)


def _on_cache(query, key, value, cached_, options):
    (B, H, S, D), (_, heads, keys, _) = query.shape, key.shape
    if heads != cached_.heads:  # those of another layer
        cached_ = cached(cached_.first, cached_.last, S, keys, heads)
    sinks, options = options["sinks"], {**options, "sinks": None}
    q = query.view(B, heads, H // heads, S, D).transpose(2, 3).reshape(B * heads * S, H // heads, D)
    k, v = (x.reshape(B * heads * keys, 1, -1) for x in (key, value))
    o = flash_attn_varlen(q, k, v, cached_.cu_q, cached_.cu_k, S, keys, seqused_k=cached_.used,
                          return_lse=sinks is not None, **options)
    if sinks is not None:  # each sequence has others: what one more key of value 0 takes from the result
        o, lse = o
        lse = lse.t().reshape(B, heads, S, H // heads) - sinks.float().view(heads, 1, -1)
        o = (o * lse.sigmoid().view(*o.shape[:2], 1)).to(o.dtype)
    return o.view(B, heads, S, H // heads, -1).transpose(1, 2).reshape(B, S, H, -1)
