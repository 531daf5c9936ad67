"""Greedy decoding of a Llama of transformers, on tkq and as it is: a prefill, then a CUDA graph for each token.

    python examples/llama_generate.py [--small] [--batch 1] [--prompt 1024] [--tokens 128]

From a config with random weights; nothing is downloaded. The cache has room for all tokens from the beginning, and how
much of it is in use stays on the GPU, so that one graph is replayed for every token. What comes out is judged by the
same model in float32 over the tokens that came out. Needs transformers >= 5.17 and a Hopper GPU.
"""
import argparse
import time

import torch
from llama_train import SIZES, SMALL, make_model, patched


class Decoder:
    """A model with a cache for so many tokens. step: the graph; it reads `now` and `place`, and moves them on."""

    def __init__(self, model, ids, room):
        from transformers import StaticCache

        self.model, self.cache = model, StaticCache(model.config, max_cache_len=room)
        self.prompt, self.graph = ids, torch.cuda.CUDAGraph()
        self.prefill()
        self.now, self.place = self.next.clone(), torch.full_like(ids[:, :1], ids.shape[1])
        warm = torch.cuda.Stream()
        warm.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm):
            self.one()
        torch.cuda.current_stream().wait_stream(warm)
        with torch.cuda.graph(self.graph):
            self.one()
        self.prefill()

    def prefill(self):
        """The prompt, from an empty cache. Returns the logits of the next token."""
        for layer in self.cache.layers:
            if layer.is_initialized:
                layer.cumulative_length.zero_()
        out = self.model(self.prompt, past_key_values=self.cache, logits_to_keep=1)
        self.next = out.logits[:, -1].argmax(-1, keepdim=True)
        return out.logits[:, -1]

    def one(self):
        self.logits = self.model(self.now, position_ids=self.place, past_key_values=self.cache).logits[:, -1]
        self.now.copy_(self.logits.argmax(-1, keepdim=True))
        self.place.add_(1)

    def generate(self, count):
        """(B, count) tokens, and the logits that they were chosen by, (B, count, V)."""
        logits = [self.prefill()]
        self.now.copy_(self.next)
        self.place.fill_(self.prompt.shape[1])
        tokens = [self.now.clone()]
        for _ in range(count - 1):
            self.graph.replay()
            tokens.append(self.now.clone())
            logits.append(self.logits.clone())
        return torch.cat(tokens, 1), torch.stack(logits, 1)

    def seconds(self, count):
        """(of a prefill, of a token)"""
        times = []
        for call, n in ((self.prefill, 1), (self.graph.replay, count)):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(n):
                call()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - start) / n)
            self.place.fill_(self.prompt.shape[1])
        return times


def forced(model, ids, count, dtype):
    """Logits of the last ``count`` tokens' predictions, of all tokens at once, by PyTorch in dtype."""
    wide = model if dtype == torch.bfloat16 else type(model)(model.config).to(device=ids.device, dtype=dtype).eval()
    if wide is not model:
        wide.load_state_dict(model.state_dict())
    return wide(ids[:, :-1], use_cache=False).logits[:, -count:].float()


def judge(model, prompt, tokens, logits):
    """Raises where logits are further from float32's than twice PyTorch's in bf16, or where a token is not float32's
    though that one leads by more than twice the error. Returns what was found, as text."""
    ids, count = torch.cat((prompt, tokens), 1), tokens.shape[1]
    right, theirs = (forced(model, ids, count, dtype) for dtype in (torch.float32, torch.bfloat16))
    error, peer = ((x.float() - right).abs() for x in (logits, theirs))
    assert error.max() <= 2 * peer.max(), f"error {error.max():.4f}, PyTorch's {peer.max():.4f}"
    first, second = right.topk(2, -1).values.unbind(-1)
    sure = first - second > 2 * peer.amax(-1)
    agree = tokens == right.argmax(-1)
    assert agree[sure].all(), f"{int((~agree & sure).sum())} tokens differ where float32 is sure"
    return (f"logits' error {error.max():.4f}, PyTorch's in bf16 {peer.max():.4f}; {int(agree.sum())} of "
            f"{agree.numel()} tokens are float32's, all {int(sure.sum())} where it is sure")


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--small", action="store_true", help="a small model")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt", type=int, help="tokens; 1024, or 96 for the small model")
    parser.add_argument("--tokens", type=int, help="to generate; 128, or 32")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("No GPU: nothing was run or timed.")
        return
    sizes = SMALL if options.small else SIZES
    length, count = options.prompt or (96 if options.small else 1024), options.tokens or (32 if options.small else 128)
    model = make_model(sizes).eval()
    model.set_attn_implementation("sdpa")
    ids = torch.randint(1, sizes["vocab_size"], (options.batch, length), device="cuda",
                        generator=torch.Generator("cuda").manual_seed(0))
    for name, each in (("torch", model), ("tkq", patched(model, attention="tkq")[0])):
        decoder = Decoder(each, ids, length + count)
        tokens, logits = decoder.generate(count)
        prefill, token = decoder.seconds(count)
        print(f"{name:5s} prefill {1e3 * prefill:.2f} ms, {1e3 * token:.3f} ms a token, "
              f"{options.batch / token:.0f} tokens/s")
        if name == "tkq":
            print(judge(model, ids, tokens, logits))


if __name__ == "__main__":
    main()
