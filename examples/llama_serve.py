"""Serving a Llama of 1.2 billion parameters on one GPU: continuous batching over a paged cache.

    python examples/llama_serve.py [--small] [--requests 256] [--slots 64] [--plot latency.png]

Requests of different lengths wait for a slot; all begin with one system prompt, whose keys and values are in the cache
once. A request is admitted when another ends: its prompt goes through in one call, then it takes part in the steps of
all slots, each of which is one CUDA graph. The peer is the same loop over a static cache and torch's
scaled_dot_product_attention. Random weights, nothing is downloaded; tokens are judged by the model in float32.
"""
import argparse
import collections
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import tkq

PAGE, EPS = 64, 1e-6


@dataclass(frozen=True)
class Sizes:
    """system: tokens of the system prompt. prompt, answer: at most so many tokens; half of it at least."""

    vocab: int = 128256
    hidden: int = 2048
    wide: int = 8192
    layers: int = 16
    heads: int = 32
    kv_heads: int = 8
    dim: int = 64
    system: int = 1024
    prompt: int = 512
    answer: int = 256

    @property
    def longest(self):
        """Tokens of a sequence, a whole number of pages."""
        return -(-(self.system + self.prompt + self.answer) // PAGE) * PAGE


SMALL = Sizes(vocab=1000, hidden=256, wide=512, layers=2, heads=4, kv_heads=2, system=128, prompt=40, answer=24)


class Model:
    """Weights, and the steps that both engines share."""

    def __init__(self, sizes, device, dtype=torch.bfloat16):
        g = torch.Generator(device).manual_seed(0)
        made = lambda *shape: (torch.randn(*shape, device=device, generator=g) * shape[-1] ** -0.5).to(dtype)
        self.sizes, heads = sizes, sizes.heads + 2 * sizes.kv_heads
        self.embedding = made(sizes.vocab, sizes.hidden) * sizes.hidden ** 0.5
        self.layers = [dict(qkv=made(heads * sizes.dim, sizes.hidden), out=made(sizes.hidden, sizes.heads * sizes.dim),
                            gate_up=made(2 * sizes.wide, sizes.hidden), down=made(sizes.hidden, sizes.wide))
                       for _ in range(sizes.layers)]
        self.norm = torch.ones(sizes.hidden, device=device, dtype=dtype)
        self.angles = tkq.rope_cos_sin(sizes.longest, sizes.dim, device=device)

    def to(self, dtype):
        """A copy."""
        other = object.__new__(Model)
        other.sizes, other.angles = self.sizes, self.angles
        other.embedding, other.norm = self.embedding.to(dtype), self.norm.to(dtype)
        other.layers = [{name: w.to(dtype) for name, w in layer.items()} for layer in self.layers]
        return other

    def qkv(self, h, layer):
        """(B, S, heads, D) each."""
        s = self.sizes
        x = F.linear(h, layer["qkv"]).unflatten(-1, (-1, s.dim))
        return x.split((s.heads, s.kv_heads, s.kv_heads), 2)

    def on_torch(self, ids, positions, attention):
        """Logits of the last token. attention: of (layer's number, q, k, v), heads first."""
        x = self.embedding[ids]
        cos, sin = (torch.cat((t[positions],) * 2, -1)[:, None] for t in self.angles)
        for i, layer in enumerate(self.layers):
            q, k, v = (t.transpose(1, 2) for t in self.qkv(F.rms_norm(x, x.shape[-1:], self.norm, EPS), layer))
            q, k = ((t * cos + torch.cat((-t[..., t.shape[-1] // 2:], t[..., :t.shape[-1] // 2]), -1) * sin).to(t.dtype)
                    for t in (q, k))
            x = x + F.linear(attention(i, q, k, v).transpose(1, 2).flatten(2), layer["out"])
            gate, up = F.linear(F.rms_norm(x, x.shape[-1:], self.norm, EPS), layer["gate_up"]).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer["down"])
        return F.linear(F.rms_norm(x, x.shape[-1:], self.norm, EPS), self.embedding)


class Engine:
    """Slots of sequences that are being answered. Subclasses have the caches: ``prefill`` and ``decode``.

    lengths: tokens in the cache; active: 1 where there is a request; tokens: the next to go in; history: those that
    came out, of which there are ``written``. All on the GPU: a step waits for nothing."""

    def __init__(self, model, slots, device):
        self.model, self.sizes, self.slots, self.device = model, model.sizes, slots, device
        zeros = lambda *shape, dtype=torch.int64: torch.zeros(*shape, dtype=dtype, device=device)
        self.lengths, self.active = zeros(slots, dtype=torch.int32), zeros(slots, dtype=torch.int32)
        self.tokens, self.written = zeros(slots), zeros(slots)
        self.history, self.graph = zeros(slots, model.sizes.answer + 1), None

    def capture(self):
        """The step, as a graph; without a GPU it runs as it is."""
        if self.device.type == "cuda":
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self.step()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.step()
            self.graph = graph
        return self

    def admit(self, slot, prompt):
        """Of a request whose system prompt is in the cache."""
        length = self.sizes.system + len(prompt)
        logits = self.prefill(slot, prompt, length)
        self.tokens[slot] = self.history[slot, 0] = logits.argmax()
        self.written[slot], self.lengths[slot], self.active[slot] = 1, length, 1

    def end(self, slot, count):
        """Frees it. Returns its ``count`` tokens."""
        self.lengths[slot] = self.active[slot] = 0
        return self.history[slot, :count].clone()

    def step(self):
        """A token more for each slot."""
        if self.graph is not None:
            self.graph.replay()
            return
        self.tokens.copy_(self.decode().argmax(-1))
        place = self.written.clamp(max=self.history.shape[1] - 1)
        self.history.scatter_(1, place[:, None], self.tokens[:, None])
        self.written += self.active
        self.lengths += self.active


class OnTkq(Engine):
    """Pages of keys and values, those of the system prompt first, which all sequences share."""

    name = "tkq"

    def __init__(self, model, slots, device, system):
        super().__init__(model, slots, device)
        s = self.sizes
        shared, each = s.system // PAGE, (s.longest - s.system) // PAGE
        shape = s.layers, 2, shared + slots * each, PAGE, s.kv_heads, s.dim
        self.caches = torch.zeros(shape, dtype=model.norm.dtype, device=device)
        self.free = list(range(shared, shape[2]))
        self.table = torch.full((slots, shared + each), -1, dtype=torch.int32, device=device)
        self.table[:, :shared] = torch.arange(shared, device=device)
        self.taken = [[] for _ in range(slots)]
        self.plan = tkq.plan_decode(self.lengths, s.heads, s.kv_heads, s.dim)
        self.run(system[None], torch.arange(s.system, device=device)[None], self.table[:1], None)

    def prefill(self, slot, prompt, length):
        pages = [self.free.pop() for _ in range(self.table.shape[1] - self.sizes.system // PAGE)]
        self.taken[slot] = pages
        self.table[slot, -len(pages):] = torch.tensor(pages, dtype=torch.int32, device=self.device)
        positions = torch.arange(self.sizes.system, length, device=self.device)[None]
        return self.run(prompt[None], positions, self.table[slot:slot + 1], None)[0]

    def end(self, slot, count):
        self.free += self.taken[slot]
        return super().end(slot, count)

    def decode(self):
        s = self.sizes
        tkq.plan_decode(self.lengths + self.active, s.heads, s.kv_heads, s.dim, out=self.plan)
        return self.run(self.tokens[:, None], self.lengths[:, None].long(), self.table, self.plan, self.active)

    def run(self, ids, positions, table, plan, active=None):
        """Logits of the last of each sequence's new tokens (B, S), whose keys go into its pages."""
        model = self.model
        slots = table.long().gather(1, positions // PAGE) * PAGE + positions % PAGE
        lengths = (positions[:, -1] + 1).int()
        if active is not None:  # nothing is written, and no key seen, where there is no request
            slots, lengths = torch.where(active[:, None] > 0, slots, -1), lengths * active
        angles = dict(cos=model.angles[0], sin=model.angles[1], positions=positions.flatten())
        x, residual = model.embedding[ids], None
        for layer, cache in zip(model.layers, self.caches):
            h, residual = tkq.rmsnorm(x, model.norm, eps=EPS, residual=residual, prenorm=True)
            q, k, v = (t.flatten(0, 1) for t in model.qkv(h, layer))
            q = tkq.kv_append(k, v, *cache, slots.flatten(), q=q, **angles).view(*ids.shape, *q.shape[1:])
            o = tkq.flash_attn_with_kvcache(q, *cache, cache_seqlens=lengths, block_table=table, plan=plan)
            h, residual = tkq.rmsnorm(F.linear(o.flatten(2), layer["out"]), model.norm, eps=EPS, residual=residual,
                                      prenorm=True)
            x = F.linear(tkq.swiglu(F.linear(h, layer["gate_up"])), layer["down"])
        return F.linear(tkq.rmsnorm(x[:, -1], model.norm, eps=EPS, residual=residual[:, -1]), model.embedding)


class OnTorch(Engine):
    """A row of a static cache for each slot, the system prompt's keys and values copied into each."""

    name = "torch"

    def __init__(self, model, slots, device, system):
        super().__init__(model, slots, device)
        s = self.sizes
        shape = s.layers, 2, slots, s.kv_heads, s.longest, s.dim
        self.caches = torch.zeros(shape, dtype=model.norm.dtype, device=device)
        self.rows, self.columns = torch.arange(slots, device=device), torch.arange(s.longest, device=device)
        self.fill(0, system, 0)
        self.caches[:, :, :, :, :s.system] = self.caches[:, :, :1, :, :s.system].clone()

    def prefill(self, slot, prompt, length):
        return self.fill(slot, prompt, self.sizes.system)

    def fill(self, slot, ids, begin):
        """Tokens from ``begin`` on into a row."""
        end = begin + len(ids)
        seen = self.columns[:end] <= self.columns[begin:end, None]

        def attention(i, q, k, v):
            for cache, new in zip(self.caches[i], (k, v)):
                cache[slot, :, begin:end] = new[0]
            k, v = self.caches[i, :, slot:slot + 1, :, :end]
            return F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)

        return self.model.on_torch(ids[None], self.columns[None, begin:end], attention)[0, -1]

    def decode(self):
        places = self.lengths.long()
        written = torch.where(self.active > 0, places, self.sizes.longest - 1)  # which no answer fills, without request
        seen = (self.columns <= places[:, None])[:, None, None]

        def attention(i, q, k, v):
            for cache, new in zip(self.caches[i], (k, v)):
                cache[self.rows, :, written] = new[:, :, 0]
            return F.scaled_dot_product_attention(q, *self.caches[i], seen, enable_gqa=True)

        return self.model.on_torch(self.tokens[:, None], places[:, None], attention)[:, -1]


def requests_of(sizes, count, device):
    """(prompt, tokens to answer) each."""
    g = torch.Generator().manual_seed(1)
    draw = lambda most: int(torch.randint(most // 2, most + 1, (), generator=g))
    return [(torch.randint(sizes.vocab, (draw(sizes.prompt),), generator=g).to(device), draw(sizes.answer))
            for _ in range(count)]


def serve(engine, requests):
    """The tokens of each request, and the seconds that all took. Between two requests' ends the host only replays."""
    waiting, running, answers = collections.deque(range(len(requests))), {}, [None] * len(requests)
    wait = torch.cuda.synchronize if engine.device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    while waiting or running:
        for slot in range(engine.slots):
            if waiting and slot not in running:
                i = waiting.popleft()
                engine.admit(slot, requests[i][0])
                running[slot] = [i, requests[i][1] - 1]  # the prompt gave the first
        steps = min(left for _, left in running.values())
        for _ in range(steps):
            engine.step()
        for slot, request in list(running.items()):
            request[1] -= steps
            if not request[1]:
                i = running.pop(slot)[0]
                answers[i] = engine.end(slot, requests[i][1])
    wait()
    return answers, time.perf_counter() - start


def judge(model, system, requests, answers):
    """AssertionError where a token is not float32's though that one leads by more than twice PyTorch's error in bf16.
    Returns what was found, as text."""
    wide, same, sure_ones, total = model.to(torch.float32), 0, 0, 0
    causal = lambda i, q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    for (prompt, count), answer in zip(requests, answers):
        ids = torch.cat((system, prompt, answer))[None, :-1]
        places = torch.arange(ids.shape[1], device=ids.device)[None]
        right, rounded = (m.on_torch(ids, places, causal)[0, -count:].float() for m in (wide, model))
        first, second = right.topk(2, -1).values.unbind(-1)
        sure, agree = first - second > 2 * (rounded - right).abs().amax(-1), answer == right.argmax(-1)
        assert agree[sure].all(), f"{int((~agree & sure).sum())} tokens differ where float32 is sure"
        same, sure_ones, total = same + int(agree.sum()), sure_ones + int(sure.sum()), total + count
    return f"{same} of {total} tokens are float32's, all {sure_ones} where it is sure"


def latency(engine, prompt, steps=20):
    """Milliseconds of a step with all slots in use."""
    for slot in range(engine.slots):
        engine.admit(slot, prompt)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        engine.step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps * 1e3


def plot(path, batches, times):
    """Latency over the batch, {engine: milliseconds}."""
    import matplotlib.pyplot as plt

    for name, found in times.items():
        plt.plot(batches, found, marker="o", label=name)
    plt.xscale("log", base=2)
    plt.xlabel("sequences")
    plt.ylabel("ms a token")
    plt.legend()
    plt.savefig(path)


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--small", action="store_true", help="a small model")
    parser.add_argument("--requests", type=int, help="256; 12 with --small")
    parser.add_argument("--slots", type=int, help="sequences at a time: 64; 4 with --small")
    parser.add_argument("--plot", help="a file for a plot of the latency over the batch")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("No GPU: nothing was run or timed.")
        return
    device, sizes = torch.device("cuda"), SMALL if options.small else Sizes()
    slots, count = options.slots or (4 if options.small else 64), options.requests or (12 if options.small else 256)
    model, system = Model(sizes, device), torch.randint(sizes.vocab, (sizes.system,), device=device)
    requests = requests_of(sizes, count, device)
    for kind in (OnTorch, OnTkq):
        engine = kind(model, slots, device, system).capture()
        serve(engine, requests[:slots])  # compiles, and what is allocated once
        answers, seconds = serve(engine, requests)
        tokens = sum(n for _, n in requests)
        print(f"{kind.name:5s} {count} requests, {slots} slots: {tokens / seconds:.0f} tokens/s, "
              f"{1e3 * seconds:.0f} ms", flush=True)
        print(f"{kind.name:5s} {judge(model, system, requests[:4], answers[:4])}", flush=True)
        del engine
    batches, times = [b for b in (1, 4, 16, 64, 128) if b <= 2 * slots], {}
    for kind in (OnTorch, OnTkq):
        times[kind.name] = [latency(kind(model, b, device, system).capture(), requests[0][0]) for b in batches]
        found = ", ".join(f"batch {b} {t:.3f} ms" for b, t in zip(batches, times[kind.name]))
        print(f"{kind.name:5s} a token: {found}", flush=True)
    if options.plot:
        plot(options.plot, batches, times)


if __name__ == "__main__":
    main()
