"""Models of transformers on tkq's kernels, from configs with random weights: training, padding, caches, CUDA graphs."""
import copy
import pathlib
import sys

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.17", reason="transformers is not installed")

import tkq.integrations.transformers as tkq_transformers  # noqa: E402
from tests.helpers.process.no_output import no_word  # noqa: E402

sys.path.append(str(pathlib.Path(__file__).parents[3] / "examples"))
BF16 = torch.bfloat16
SIZES = dict(vocab_size=1000, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=64, max_position_embeddings=512, pad_token_id=0)
MORE = {"Llama": {}, "Qwen3": {}, "Gemma2": dict(sliding_window=64, query_pre_attn_scalar=64)}


@pytest.fixture(autouse=True)
def quiet(capfd, caplog):
    with no_word(capfd, caplog):
        yield


def model(name, dtype=BF16, attn="tkq", **more):
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **MORE[name], **more})
    config._attn_implementation = attn
    torch.manual_seed(0)
    made = getattr(transformers, f"{name}ForCausalLM")(config).to(device="cuda", dtype=BF16)
    with torch.no_grad():
        for p in made.parameters():  # norms' weights too
            p.add_(torch.randn_like(p) * 0.02)
    return made.to(dtype)


def tokens(B=2, S=200, seed=1):
    return torch.randint(1, 1000, (B, S), device="cuda", generator=torch.Generator("cuda").manual_seed(seed))


def step(m, ids):
    m.zero_grad()
    loss = m(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in m.named_parameters()}


def judge(mine, peer, right, what):
    """(loss, gradients): the error in the mean square is at most that of plain PyTorch in bf16, and half of it more."""
    assert abs(mine[0] - right[0]) <= 2 * abs(peer[0] - right[0]) + 2e-3, (what, mine[0], peer[0], right[0])
    for name, wanted in right[1].items():
        error, theirs = ((g[1][name].double() - wanted).norm() / wanted.norm() for g in (mine, peer))
        assert error <= 1.5 * theirs + 1e-3, f"{what} {name}: {error:.2e}, PyTorch {theirs:.2e}"


@pytest.mark.parametrize("name", MORE)
def test_a_step(name):
    ids = tokens()
    right = step(model(name, torch.float64, "eager"), ids)
    peer = step(model(name, attn="eager"), ids)
    m = model(name)
    report = tkq_transformers.patch(m)
    assert report.replaced[f"{name}DecoderLayer"] == 2 and not report.left
    judge(step(m, ids), peer, right, name)


@pytest.mark.slow
@pytest.mark.parametrize("linear", [None, "tkq"])
def test_compiled(linear):
    """In one graph."""
    ids, m = tokens(), model("Llama")
    right, peer = step(model("Llama", torch.float64, "eager"), ids), step(model("Llama", attn="eager"), ids)
    tkq_transformers.patch(m, linear=linear)
    torch._dynamo.reset()
    compiled = torch.compile(m, fullgraph=True, backend="aot_eager")
    m.zero_grad()
    loss = compiled(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    judge((loss.item(), {name: p.grad for name, p in m.named_parameters()}), peer, right, "compiled")


@pytest.mark.parametrize("linear", ["tkq", "fp8", "fp8_block", "fp8_tensor"])
def test_linear_layers(linear):
    ids, m = tokens(), model("Llama")
    right, peer = step(model("Llama", torch.float64, "eager"), ids), step(model("Llama", attn="eager"), ids)
    tkq_transformers.patch(m, linear=linear)
    mine = step(m, ids)
    if linear == "tkq":
        return judge(mine, peer, right, linear)
    assert abs(mine[0] - right[0]) < 0.02
    for name, wanted in right[1].items():
        assert torch.nn.functional.cosine_similarity(mine[1][name].double().flatten(), wanted.flatten(), 0) > 0.98, name
    return None


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_padding(name, side):
    """Each sequence gets what it gets alone; gradients too."""
    m, ids, length = model(name), tokens(), 120
    keep = torch.ones_like(ids)
    keep[0, slice(0, 80) if side == "left" else slice(120, 200)] = 0
    alone = ids[:1, 80:] if side == "left" else ids[:1, :length]
    places = (keep.cumsum(1) - 1).clamp(min=0)
    out = m(ids, attention_mask=keep, position_ids=places, use_cache=False).logits
    want, whole = m(alone, use_cache=False).logits[0], m(ids[1:], use_cache=False).logits[0]
    assert (out[0][keep[0].bool()] - want).norm() <= 0.01 * want.norm()
    assert (out[1] - whole).norm() <= 0.01 * whole.norm()
    labels = ids.masked_fill(keep == 0, -100)
    m(ids, attention_mask=keep, position_ids=places, labels=labels, use_cache=False).loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in m.parameters())


def test_packed_rows():
    m, ids = model("Llama"), tokens()
    places = torch.cat((torch.arange(70), torch.arange(130))).cuda()
    with torch.no_grad():
        want = torch.cat([m(ids[:1, a:b], use_cache=False).logits[0] for a, b in ((0, 70), (70, 200))])
        for more in (dict(use_cache=False), {}, dict(use_cache=True), dict(attention_mask=torch.ones_like(ids[:1]))):
            out = m(ids[:1], position_ids=places[None], **more).logits[0]
            assert (out - want).norm() <= 0.01 * want.norm(), more


@pytest.mark.parametrize("padded", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_decoding_with_a_graph(padded):
    """A step on a static cache, replayed, gives what a cache that grows gives. (A mask of padding cannot be looked at
    while a graph is captured: transformers' sdpa serves it.)"""
    m, ids = model("Llama").eval(), tokens(S=32)
    keep = torch.ones(2, 48, dtype=torch.long, device="cuda")
    keep[0, :10] = 0 if padded else 1
    places = (keep.cumsum(1) - 1).clamp(min=0)
    mask = (lambda n: keep[:, :n]) if padded else (lambda n: None)
    with torch.no_grad():
        growing = transformers.DynamicCache(config=m.config)
        static = transformers.StaticCache(m.config, max_cache_len=48)
        for cache in (growing, static):
            m(ids[:, :20], attention_mask=mask(20), position_ids=places[:, :20], past_key_values=cache)
        one, where = ids[:, 20:21].clone(), places[:, 20:21].clone()
        call = dict(input_ids=one, position_ids=where, past_key_values=static, attention_mask=keep if padded else None)
        length = [layer.cumulative_length for layer in static.layers]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            m(**call)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = m(**call).logits
        for n in length:
            n.fill_(20)
        for i in range(20, 32):
            one.copy_(ids[:, i:i + 1])
            where.copy_(places[:, i:i + 1])
            graph.replay()
            want = m(ids[:, i:i + 1], attention_mask=mask(i + 1), position_ids=places[:, i:i + 1],
                     past_key_values=growing).logits
            assert (out - want).norm() <= 0.01 * want.norm(), i


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("cache", ["dynamic", "static", pytest.param("compiled", marks=pytest.mark.slow)])
def test_generate(cache, padded):
    """The logits of each step are the whole sequence's. compiled: a static cache's steps, as generate compiles them
    where nothing else is asked for."""
    m, ids = model("Llama").eval(), tokens(S=32)
    tkq_transformers.patch(m)
    keep = torch.ones_like(ids)
    keep[0, :10] = 0 if padded else 1
    torch._dynamo.reset()
    out = m.generate(ids, attention_mask=keep, max_new_tokens=8, do_sample=False, output_logits=True,
                     return_dict_in_generate=True, cache_implementation="dynamic" if cache == "dynamic" else "static",
                     disable_compile=cache != "compiled")
    keep = torch.nn.functional.pad(keep, (0, 7), value=1)
    with torch.no_grad():
        want = m(out.sequences[:, :-1], attention_mask=keep, position_ids=(keep.cumsum(1) - 1).clamp(min=0),
                 use_cache=False).logits[:, 31:]
    found = torch.stack(out.logits, 1)
    assert (found - want).norm() <= 0.02 * want.norm()


@pytest.mark.slow
@pytest.mark.parametrize("linear", [None, "fp8", "fp8_block", "fp8_tensor"])
def test_learning(linear):
    """200 steps of the example's small model on its synthetic language: the same losses, within 0.5 % in the mean of
    ten steps (float8: 2 %)."""
    import llama_train

    model = llama_train.make_model(llama_train.SMALL)
    batches = llama_train.language(4, 512, 200, llama_train.SMALL["vocab_size"])
    weights = [p.detach().clone() for p in model.parameters()]
    runs = llama_train.Run("torch", model), llama_train.Run("tkq", llama_train.patched(model, linear)[0])
    theirs, ours = (llama_train.learn(run, model, batches, weights, rate=1e-3) for run in runs)
    assert theirs[-1] < 0.75 * theirs[0], "nothing was learnt"
    assert llama_train.apart(ours, theirs) < (0.005 if linear is None else 0.02)


def test_a_copy_is_its_own():
    """A deep copy of a patched model computes with its own parameters."""
    m, ids = model("Llama"), tokens(S=32)
    tkq_transformers.patch(m)
    other = copy.deepcopy(m)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(0.5)
        assert not torch.equal(m(ids).logits, other(ids).logits)
