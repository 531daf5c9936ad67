"""Training a Llama of 1.2 billion parameters, as transformers has it and patched with tkq: loss, tokens/s, memory.

    python examples/llama_train.py [--small] [--steps 200] [--compile] [--linear none|tkq|fp8|..]

From a config with random weights; nothing is downloaded. bf16, sequences of 4096 tokens, AdamW. Both models begin with
the same weights and learn the same synthetic language; then their steps are timed, in turns. The unpatched one has
whichever backend of torch's scaled_dot_product_attention is fastest here. Needs transformers >= 5.17 and a Hopper GPU.
"""
import argparse
import contextlib
import copy
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Optional

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

SIZES = dict(vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
             num_key_value_heads=8, head_dim=64, max_position_embeddings=8192, tie_word_embeddings=True, pad_token_id=0)
SMALL = {**SIZES, "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2}
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
            "efficient": SDPBackend.EFFICIENT_ATTENTION}
WORDS = 2000  # of the vocabulary that the language has
RATE, WARM_UP, CLIP = 1e-4, 40, 1.0  # of learning, at most; steps until it is reached; the gradients' norm at most


def make_model(sizes=SIZES):
    """As transformers has it. Its attention gets no mask, as nothing is padded: with one, torch's fast backends are out
    of the question."""
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("sdpa_without_mask", sdpa_attention_forward)
    torch.manual_seed(0)
    with torch.device("cuda"):
        return LlamaForCausalLM._from_config(LlamaConfig(**sizes), dtype=torch.bfloat16,
                                             attn_implementation="sdpa_without_mask").train()


def patched(model, linear=None, attention="tkq_unmasked"):
    """A second model with the same parameters, not copies of them, on tkq. attention: "tkq" where there are masks or
    static caches; in a training step here nobody needs one, the unpatched model neither."""
    import tkq.integrations.transformers as tkq_transformers

    other = copy.deepcopy(model, {id(x): x for x in (*model.parameters(), *model.buffers())})
    other.set_attn_implementation(attention)
    report = tkq_transformers.patch(other, linear=linear)
    return other, report


def language(batch, seqlen, count, vocabulary, seed=0):
    """(count, batch, seqlen) tokens: words by Zipf's law, each said once more half of the time. It is learnt little by
    little, and soon known. (A language that a model sees through all of a sudden, after steps without progress, shows
    how a run's roundings grow until then, and not how well it computes.)"""
    g = torch.Generator("cuda").manual_seed(seed)
    words = torch.randperm(vocabulary, device="cuda", generator=g)[:WORDS]
    odds = (1.0 / torch.arange(10, len(words) + 10, device="cuda", dtype=torch.float64)).cumsum(0)
    drawn = torch.rand(count * batch, seqlen, device="cuda", generator=g, dtype=torch.float64) * odds[-1]
    new = torch.searchsorted(odds, drawn).clamp(max=len(words) - 1)
    again = torch.rand(new.shape, device="cuda", generator=g) < 0.5
    place = torch.arange(seqlen, device="cuda").expand_as(new).masked_fill(again, 0).cummax(1).values
    return words[new.gather(1, place)].view(count, batch, seqlen)


@dataclass
class Run:
    """One way to make a step. call: of a batch, the loss."""

    name: str
    call: Callable
    backend: Optional[SDPBackend] = None

    def attention(self):
        return contextlib.nullcontext() if self.backend is None else sdpa_kernel(self.backend)

    def step(self, ids, optimizer, clip=None):
        """clip: the norm that gradients are scaled down to, where it is larger."""
        with self.attention():
            loss = self.call(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()


def make_optimizer(model, rate=RATE):
    return torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), fused=True)


def learn(run, model, batches, weights, rate=RATE, seen=None):
    """Losses of so many steps from the same weights: the rate rises, then falls to nothing. seen: gets those that there
    are after every 50."""
    with torch.no_grad():
        for p, w in zip(model.parameters(), weights):
            p.copy_(w)
    optimizer, losses, steps = make_optimizer(model), [], len(batches)
    for i, ids in enumerate(batches):
        optimizer.param_groups[0]["lr"] = rate * min((i + 1) / WARM_UP, (steps - i) / max(1, steps - WARM_UP), 1.0)
        losses.append(run.step(ids, optimizer, CLIP))
        if seen is not None and (i + 1) % 50 == 0:
            seen(torch.stack(losses).tolist())
    return torch.stack(losses).tolist()


def apart(a, b, window=10):
    """How far two curves of losses are apart, in the mean of ten steps, relatively and at most."""
    means = [[statistics.fmean(x[i:i + window]) for i in range(0, len(x) - window + 1, window)] for x in (a, b)]
    return max(abs(x - y) / y for x, y in zip(*means))


def seconds(run, batches, optimizer, hosts=None):
    """Of a step. hosts: gets what the host took to ask for the first one's work; the GPU had none before."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for i, ids in enumerate(batches):
        run.step(ids, optimizer)
        if i == 0 and hosts is not None:
            hosts.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / len(batches)


def memory(run, ids, optimizer):
    """Bytes in use at most in a step, parameters and the optimizer's state included."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run.step(ids, optimizer)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def time_steps(runs, batches, optimizer, rounds=5, each=2, hosts=None):
    """{name: seconds of a step in each round}, in turns, each of which begins with a step that does not count. hosts: a
    list for each name: see ``seconds``."""
    found = {run.name: [] for run in runs}
    gc.collect()
    gc.freeze()  # what compilers left behind is not looked through again while steps are timed
    try:
        for i in range(rounds):
            for run in runs if i % 2 == 0 else reversed(runs):
                run.step(batches[0], optimizer)
                found[run.name].append(seconds(run, batches[:each], optimizer, hosts and hosts[run.name]))
    finally:
        gc.unfreeze()
    return found


def with_best_attention(name, call, batches, optimizer):
    """The call with the backend of torch's attention that makes its steps fastest here, and what each takes (None:
    it does not take this call)."""
    found = {}
    for backend, kind in BACKENDS.items():
        run = Run(name, call, kind)
        try:
            run.step(batches[0], optimizer)
            found[backend] = min(seconds(run, batches[:2], optimizer) for _ in range(2))
        except RuntimeError:  # no kernel for heads that share keys, say
            optimizer.zero_grad()
            found[backend] = None
    best = min((b for b, t in found.items() if t is not None), key=found.get)
    return Run(f"{name} ({best})", call, BACKENDS[best]), found


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--small", action="store_true", help="a small model and short sequences")
    parser.add_argument("--steps", type=int, help="of learning; 200, or 20 of the small model")
    parser.add_argument("--batch", type=int, default=2, help="sequences")
    parser.add_argument("--compile", action="store_true", help="both under torch.compile, too")
    parser.add_argument("--linear", choices=("none", "tkq", "fp8", "fp8_block", "fp8_tensor"), default="tkq",
                        help="the patched model's linear layers; none: as they are")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("No GPU: nothing was run or timed.")
        return
    sizes, seqlen = (SMALL, 512) if options.small else (SIZES, 4096)
    steps = options.steps if options.steps is not None else 20 if options.small else 200
    model = make_model(sizes)
    other, report = patched(model, None if options.linear == "none" else options.linear)
    print(report)
    batches = language(options.batch, seqlen, max(steps, 4), sizes["vocab_size"])
    optimizer = make_optimizer(model, 0.0)  # for what is timed: the weights stay
    plain, backends = with_best_attention("torch", model, batches, optimizer)
    print("torch's attention, a step:", ", ".join(
        f"{b} {'-' if t is None else f'{1e3 * t:.1f} ms'}" for b, t in backends.items()))
    ours = Run("tkq", other)
    runs = [plain, ours]
    if options.compile:
        runs += [Run(f"{run.name}, compiled", torch.compile(run.call), run.backend) for run in runs]
    for run in runs:
        for _ in range(2):
            run.step(batches[0], optimizer)
    tokens = options.batch * seqlen
    for name, times in time_steps(runs, batches, optimizer).items():
        t = statistics.median(times)
        most = memory(next(run for run in runs if run.name == name), batches[0], optimizer)
        print(f"{name:26s} {1e3 * t:8.2f} ms a step, {tokens / t:9.0f} tokens/s, {most / 2**30:6.2f} GiB")
    if steps < 10:
        return
    del optimizer
    weights = [p.detach().clone() for p in model.parameters()]
    curves = [learn(run, model, batches[:steps], weights) for run in (plain, ours)]
    print(f"losses of {steps} steps: {curves[0][0]:.3f} to {curves[0][-1]:.3f}, with tkq {curves[1][0]:.3f} to "
          f"{curves[1][-1]:.3f}; {100 * apart(curves[1], curves[0]):.3f} % apart at most, in the mean of ten")


if __name__ == "__main__":
    main()
