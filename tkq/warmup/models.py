"""Which kernels a known model takes: its shapes in a table, and the calls that its training and inference make.

    python -m tkq.warmup.models llama-8b        # the kernels, by op

The calls are made as a model makes them, on tensors without memory (see ``compile.dry_run``): which kernels they take
is decided where it always is. Weights and activations are bfloat16.
"""
from __future__ import annotations

import base64
import json
import pickle
import subprocess
import sys
from typing import NamedTuple, Optional

from ..runtime.compile.recipe import Shipped


class Model(NamedTuple):
    """A decoder's shapes. hidden: columns of a token. heads, kv_heads, head_dim: of attention. inner: columns in the
    gated MLP, activation its function ("swiglu", "geglu"). vocabulary: classes. bias: do the products for queries, keys
    and values have one? head_norm: queries and keys are normalised by heads. offset: what is added to norms' weights.
    window: keys that every other layer sees. score_cap, logit_cap: soft caps of scores and of logits."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int
    bias: bool = False
    head_norm: bool = False
    offset: float = 0.0
    activation: str = "swiglu"
    window: Optional[int] = None
    score_cap: float = 0.0
    logit_cap: Optional[float] = None


MODELS = {
    "llama-1b": Model(2048, 32, 8, 64, 8192, 128256),
    "llama-3b": Model(3072, 24, 8, 128, 8192, 128256),
    "llama-8b": Model(4096, 32, 8, 128, 14336, 128256),
    "llama-70b": Model(8192, 64, 8, 128, 28672, 128256),
    "mistral-7b": Model(4096, 32, 8, 128, 14336, 32768),
    "qwen2-7b": Model(3584, 28, 4, 128, 18944, 152064, bias=True),
    "qwen3-8b": Model(4096, 32, 8, 128, 12288, 151936, head_norm=True),
    "gemma2-9b": Model(3584, 16, 8, 256, 14336, 256000, offset=1.0, activation="geglu", window=4096,
                       score_cap=50.0, logit_cap=30.0),
    "gemma3-4b": Model(2560, 8, 4, 256, 10240, 262208, head_norm=True, offset=1.0, activation="geglu", window=1024),
}
TRAINED = (4096, 8192, 16384)  # tokens of a training step
PREFILLED = (128, 512, 1024, 2048, 4096, 8192)  # of a prompt
DECODED = (1, 2, 4, 8, 16, 32, 64)  # sequences that are continued by one token each
CACHED = (512, 2048, 8192)  # keys that such a token sees


def found(of) -> Model:
    """The model of a name, of a configuration as transformers has them, or itself.

    Raises:
        ValueError: a name that the table lacks, or a configuration that lacks a size.
    """
    if isinstance(of, Model):
        return of
    if not isinstance(of, str):
        return _configured(of)
    if of not in MODELS:
        raise ValueError(f"no model {of!r}; known are {', '.join(MODELS)}")
    return MODELS[of]


def kernels(of) -> list[Shipped]:
    """What models take, each kernel once. Found out by a process of its own. Raises what ``found`` does."""
    given = json.dumps([found(one) for one in of])
    from ..runtime.system import child

    done = subprocess.run(child.command("tkq.warmup.models", "--pickled", given), capture_output=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the models' calls could not be made: {done.stderr.decode()[-2000:]}")
    return pickle.loads(base64.b64decode(done.stdout.rpartition(b"\n")[2]))


def rehearsed(models, device: str = "meta") -> list[Shipped]:
    """The same, in this process, which launches nothing from then on. device: as ``dry_run.begin`` has it."""
    from ..runtime.compile import dry_run

    dry_run.begin(device=device)
    taken: dict = {}
    for model in models:
        for op, call in calls(model):
            call()
            for recipe in dry_run.taken():
                taken.setdefault(recipe, f"{_name(model)}/{op}")
    numbers: dict = {}
    for recipe, name in taken.items():
        numbers[name] = numbers.get(name, 0) + 1
        taken[recipe] = f"{name}-{numbers[name]}"
    return [Shipped(name, recipe) for recipe, name in taken.items()]


def _name(model):
    return next((name for name, known in MODELS.items() if known == model), f"{model.hidden}x{model.inner}")


def _configured(config) -> Model:
    config = getattr(config, "text_config", None) or config
    try:
        heads = config.num_attention_heads
        sizes = (config.hidden_size, heads, getattr(config, "num_key_value_heads", None) or heads,
                 getattr(config, "head_dim", None) or config.hidden_size // heads, config.intermediate_size,
                 config.vocab_size)
    except AttributeError as error:
        raise ValueError(f"{type(config).__name__} is no configuration of a decoder: {error}") from None
    kind = getattr(config, "model_type", "")
    gemma = kind.startswith("gemma")
    return Model(
        *sizes, bias=bool(getattr(config, "attention_bias", False)) or kind == "qwen2",
        head_norm=kind.startswith(("qwen3", "gemma3")), offset=1.0 if gemma else 0.0,
        activation="geglu" if gemma else "swiglu", window=getattr(config, "sliding_window", None),
        score_cap=getattr(config, "attn_logit_softcapping", None) or 0.0,
        logit_cap=getattr(config, "final_logit_softcapping", None))


def calls(m: Model):
    """(op, call) of all that training and inference do, layer by layer."""
    for tokens in TRAINED:
        yield from _layer(m, 1, tokens, tokens, training=True)
    for tokens in PREFILLED:
        yield from _layer(m, 1, tokens, tokens, training=False)
    for batch in DECODED:
        for keys in CACHED:
            yield from _layer(m, batch, 1, keys, training=False)


def _layer(m, batch, rows, keys, training):
    tokens = batch * rows
    yield from _norms(m, batch, rows, training)
    yield from _attention(m, batch, rows, keys, training)
    yield from _products(m, tokens, training)
    gated = _gated(m)
    yield m.activation, lambda: _run(gated, training, _new(batch, rows, m.inner), _new(batch, rows, m.inner))
    if training:
        yield from _losses(m, tokens)


def _norms(m, batch, rows, training):
    import tkq

    how = dict(weight_offset=m.offset) if m.offset else {}
    x, w = _new(batch, rows, m.hidden), _new(m.hidden)
    yield "rmsnorm", lambda: _run(lambda x, w: tkq.rmsnorm(x, w, **how), training, x, w)
    yield "rmsnorm", lambda: _run(lambda x, w, r: tkq.rmsnorm(x, w, residual=r, prenorm=True, **how), training, x, w, x)
    if m.head_norm:
        for heads in (m.heads, m.kv_heads):
            x, w = _new(batch, rows, heads, m.head_dim), _new(m.head_dim)
            yield "rmsnorm", lambda x=x, w=w: _run(lambda x, w: tkq.rmsnorm(x, w, **how), training, x, w)


def _attention(m, batch, rows, keys, training):
    import tkq

    q, k = _new(batch, rows, m.heads, m.head_dim), _new(batch, keys, m.kv_heads, m.head_dim)
    new_k, half, ends = _new(batch, rows, m.kv_heads, m.head_dim), m.head_dim // 2, _new(3, dtype="int32")
    for cos in (_new(rows, half, dtype="float32"), _new(rows, half), _new(1, rows, half)):  # the last: transformers'
        yield "rope", lambda cos=cos: _run(lambda q, k: tkq.rope_qk(q, k, cos, cos), training, q, new_k)
    for window in dict.fromkeys((None, m.window)):
        how = dict(causal=True, softcap=m.score_cap, window_size=(-1 if window is None else window - 1, 0))
        yield "flash_attn", lambda how=how: _run(lambda *qkv: tkq.flash_attn(*qkv, **how), training, q, k, k)
        if rows > 1:
            packed = lambda *qkv, how=how: tkq.flash_attn_varlen(*qkv, ends, ends, rows, keys, **how)
            yield "flash_attn_varlen", lambda packed=packed: _run(packed, training, q[0], k[0], k[0])
        else:  # on a cache of fixed size, as transformers' static one, each K/V head of a sequence by itself
            given = q.view(-1, m.heads // m.kv_heads, m.head_dim), *[k.view(-1, 1, m.head_dim)] * 2
            yield "flash_attn_varlen", lambda how=how, given=given: _run(lambda *qkv: tkq.flash_attn_varlen(
                *qkv, ends, ends, rows, keys, seqused_k=ends[1:], **how), training, *given)


def _products(m, tokens, training):
    import tkq

    wide, narrow = m.heads * m.head_dim, m.kv_heads * m.head_dim
    shapes = {(m.hidden, wide, m.bias), (m.hidden, narrow, m.bias), (wide, m.hidden, False),
              (m.hidden, m.inner, False), (m.inner, m.hidden, False)}
    if not training:  # there the loss multiplies by it
        shapes.add((m.hidden, m.vocabulary, False))
    for inner, outer, biased in sorted(shapes):
        given = [_new(tokens, inner), _new(outer, inner)] + [_new(outer)] * biased
        yield "gemm", lambda given=given: _run(_linear(tkq.gemm), training, *given)


def _linear(gemm):
    return lambda x, w, bias=None: gemm(x, w.t(), bias=bias)


def _losses(m, tokens):
    import tkq

    target, how = _new(tokens, dtype="int64"), dict(softcap=m.logit_cap)
    x, w, logits = _new(tokens, m.hidden), _new(m.vocabulary, m.hidden), _new(tokens, m.vocabulary)
    yield "cross_entropy", lambda: _run(lambda x: tkq.cross_entropy(x, target, **how), True, logits)
    yield "linear_cross_entropy", lambda: _run(lambda x, w: tkq.linear_cross_entropy(x, w, target, **how), True, x, w)


def _gated(m):
    import tkq

    return tkq.swiglu if m.activation == "swiglu" else lambda gate, up: tkq.geglu(gate, up, approximate="tanh")


def _new(*shape, dtype="bfloat16"):
    import torch

    from ..runtime.compile import dry_run

    return torch.empty(shape, dtype=getattr(torch, dtype), device=dry_run.device())


def _run(function, training, *given):
    """Call it; in training record it and ask for all gradients."""
    import torch

    if not training:
        with torch.no_grad():
            function(*given)
        return
    leaves = [t.detach().requires_grad_() for t in given]
    results = function(*leaves)
    results = results if isinstance(results, tuple) else (results,)
    torch.autograd.grad(results, leaves, [torch.empty_like(y) for y in results])


def main(words) -> int:
    if words[:1] == ["--pickled"]:
        taken = rehearsed([Model(*one) for one in json.loads(words[1])])
        print("\n" + base64.b64encode(pickle.dumps(taken)).decode(), end="")
    else:
        taken = rehearsed(list(map(found, words)))
        print(*(f"{kernel.name}: {kernel.recipe.builder} {kernel.recipe.args}" for kernel in taken), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
