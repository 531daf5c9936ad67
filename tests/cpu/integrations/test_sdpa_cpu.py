"""tkq.integrations.sdpa without a GPU: which calls it takes, and that what was there before comes back."""
import contextlib
import operator
import threading

import pytest
import torch

from tests.helpers.emulation import fake_gpu
from tests.helpers.process.no_output import no_word
from tkq.integrations import sdpa, sdpa_kernels
from tkq.integrations.sdpa import Call, why_not

registry = torch.nn.attention
if not hasattr(registry, "restore_flash_attention_impl"):
    pytest.skip("this torch has no registry of flash attentions", allow_module_level=True)
BF16, OP = torch.bfloat16, torch.ops.aten._scaled_dot_product_flash_attention


@pytest.fixture(autouse=True)
def quiet(capfd, caplog):
    sdpa._pass_torchs_first_choice()  # or it choice changes the order that tests compare, where a GPU is
    with no_word(capfd, caplog):
        yield


def dense(Sq=7, Sk=7, H=4, Hk=2, D=64, Dv=None, B=2, dtype=BF16):
    return (torch.zeros(B, Sq, H, D, dtype=dtype), torch.zeros(B, Sk, Hk, D, dtype=dtype),
            torch.zeros(B, Sk, Hk, Dv or D, dtype=dtype))


def packed(total=14, dtype=BF16):
    return tuple(torch.zeros(total, heads, 64, dtype=dtype) for heads in (4, 2, 2))


def ints(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


CU = ints(0, 5, 14)
TAKEN = (
    (dense(), Call()), (dense(), Call(causal=True)), (dense(Sq=3), Call()), (dense(Sk=3), Call(scale=0.3)),
    (dense(dtype=torch.float16), Call()), (dense(D=8), Call()), (dense(D=256), Call()), (dense(D=192, Dv=128), Call()),
    (dense(H=4, Hk=1), Call(causal=True, left=16, right=-1)), (dense(), Call(left=3, right=4)),
    (tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in dense()), Call()),
    (dense(B=1)[:1] + tuple(x.expand(1, 7, 4, 64) for x in dense(B=1, Hk=1)[1:]), Call()),
    (packed(), Call(cu_q=CU, cu_k=CU)), (packed(), Call(cu_q=CU, cu_k=ints(0, 4, 14), causal=True)),
    (packed(), Call(cu_q=CU, cu_k=CU, used_k=ints(3, 4))),
)
REFUSED = (
    (dense(), Call(dropout_p=0.1), "dropout"), (dense(), Call(debug=True), "debug"),
    (dense(), Call(alibi=True), "alibi"),
    (packed(), Call(cu_q=CU, cu_k=CU, paged=True), "pages"),
    (dense(), Call(scale=1e39), "scale"), (dense(), Call(scale=0.0), "scale"), (dense(), Call(scale=-1.0), "scale"),
    (dense(), Call(scale=float("inf")), "scale"), (dense(), Call(scale=float("nan")), "scale"),
    (dense(Sq=3), Call(causal=True), "top left"), (dense(Sk=3), Call(causal=True), "top left"),
    (dense(D=264), Call(), "264"), (dense(D=12), Call(), "12"), (dense(dtype=torch.float32), Call(), "float32"),
    (dense()[:2] + dense(dtype=torch.float16)[2:], Call(), "types"),
    (dense(H=3, Hk=2), Call(), "3 heads on 2"), (dense(Sk=0), Call(), "nothing"), (dense(Sq=0), Call(), "nothing"),
    (tuple(x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in dense()), Call(), "strides"),
    (tuple(torch.zeros(2, 7, 4, 65, dtype=BF16)[..., :64] for _ in range(3)), Call(), "strides"),
    (tuple(torch.zeros(2 * 7 * 4 * 64 + 1, dtype=BF16)[1:].view(2, 7, 4, 64) for _ in range(3)), Call(), "address"),
    (dense()[:1] + dense(B=1)[1:], Call(), "shapes"), (dense(), Call(cu_q=CU, cu_k=CU), "shapes"),
    (packed(), Call(), "shapes"), (packed(), Call(cu_q=CU), "shapes"), (dense(), Call(cu_k=CU), "shapes"),
    (dense(D=256, Dv=264), Call(), "264"), (dense(), Call(used_k=ints(3, 4)), "lengths"),
    (packed(), Call(cu_q=CU.long(), cu_k=CU), "int32"), (packed(), Call(cu_q=CU, cu_k=ints(0, 14)), "go together"),
    (packed(), Call(cu_q=CU, cu_k=CU, used_k=ints(3)), "go together"),
    (packed(), Call(cu_q=ints(0, 9, 5, 9, 14)[::2], cu_k=CU), "contiguous"),
)


@pytest.mark.parametrize("tensors, call", TAKEN)
def test_takes(tensors, call):
    assert why_not(*tensors, call) is None


@pytest.mark.parametrize("tensors, call, word", REFUSED)
def test_leaves(tensors, call, word):
    assert word in why_not(*tensors, call)


def test_a_windows_limits():
    assert sdpa_kernels._options(Call(left=-1, right=-1)) == (False, None, -1, -1, 0.0)
    assert sdpa_kernels._options(Call(causal=True, left=5, right=-1, scale=0.5)) == (True, 0.5, 5, -1, 0.0)
    assert sdpa_kernels._options(Call(left=None, right=0)) == (True, None, -1, -1, 0.0)
    assert sdpa_kernels._options(Call(left=0, right=7)) == (False, None, 0, 7, 0.0)


@pytest.fixture
def launched(monkeypatch):
    monkeypatch.setattr(sdpa_kernels, "on_hopper", lambda x: True)
    with fake_gpu.launches() as seen:
        yield seen


def test_what_packed_calls_are_launched_with(launched):
    (q, k, v), used, cu_k = packed(), ints(3, 4), ints(0, 4, 14)
    o, lse, *_ = sdpa_kernels.flash_forward(q, k, v, CU, cu_k, 9, 10, 0.0, False, False, scale=0.3, window_size_left=3,
                                            window_size_right=5, seqused_k=used)
    (operands, sequences, _, numbers), = [args for _, args in launched]
    assert all(map(operator.is_, operands, (q, k, v, o, lse))) and numbers[:4] == (0.3, 0.0, 3, 5)
    assert sequences[0] is CU and sequences[1] is cu_k and sequences[2] is None and sequences[3] is used


@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize("ragged", (False, True))
def test_what_gradients_are_launched_with(ragged, deterministic, launched):
    q, k, v = packed() if ragged else dense(B=1)
    cu, lse = (CU, CU, 9, 9) if ragged else (None, None, 7, 7), torch.zeros(*[1] * (not ragged), 4, q.shape[-3])
    torch.use_deterministic_algorithms(deterministic)
    try:
        found = sdpa_kernels.flash_backward(q, q, k, v, q, lse, *cu, 0.0, False, None, None, scale=0.3,
                                            window_size_left=3, window_size_right=5)
    finally:
        torch.use_deterministic_algorithms(False)
    (recipe, (operands, gradients, _, _, numbers)), = launched
    assert recipe.args[0].deterministic == deterministic and numbers[:4] == (0.3, 0.0, 3, 5)
    assert all(map(operator.is_, (*operands, *gradients), (q, q, k, v, q, lse, None, *found)))


def test_gradients_of_what_another_kernel_left_are_its_own(launched):
    """A log-sum-exp or a result of another type or shape than tkq has."""
    q, k, v = dense(B=1)
    lse = torch.zeros(1, 4, 7)
    for o, of in ((q, lse[..., :6]), (q, lse.mT), (q, lse.double()), (q[:, :6], lse), (q.float(), lse)):
        assert sdpa_kernels.flash_backward(q, q, k, v, o, of, None, None, 7, 7, 0.0, False, None, None) is None
    assert not launched


def test_results_that_tkq_does_not_write(launched):
    """Heads of other columns than the keys', which aten's op has no shape for, and an out that TMA cannot take."""
    q, k, v = dense(D=192, Dv=128)
    assert sdpa_kernels.sdpa_forward(*(x.transpose(1, 2) for x in (q, k, v))) is None
    (q, k, v), out = packed(), torch.zeros(14, 4, 65, dtype=BF16)[..., :64]
    for bad in (out, torch.zeros(14, 4, 64), torch.zeros(14, 2, 64, dtype=BF16)):
        assert sdpa_kernels.flash_forward_into(bad, q, k, v, CU, CU, 9, 9, 0.0, False, False) is None
    assert not launched
    assert sdpa_kernels.flash_forward_into(torch.zeros_like(q), q, k, v, CU, CU, 9, 9, 0.0, False, False) is not None


@pytest.fixture
def in_place_of_torchs():
    """A kernel on the CPU in the place that torch's flash attention has on a GPU; says how it was called."""
    called, library = [], torch.library.Library("aten", "IMPL")

    def kernel(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
        called.append((dropout_p, is_causal, scale))
        nothing = q.new_empty(0)
        return q.clone(), nothing, None, None, 1, 2, nothing, nothing, nothing

    library.impl("_scaled_dot_product_flash_attention", kernel, "CPU")
    yield called
    library._destroy()


def test_what_is_left_goes_where_it_went_before(in_place_of_torchs):
    q = torch.randn(1, 2, 3, 8)
    kernels = sdpa.Kernels("CPU")
    try:
        o, _, cu, _, rows, *_ = OP(q, q, q, 0.25, True, scale=0.5)  # on the CPU, so it is not for tkq
        assert torch.equal(o, q) and cu is None and rows == 1
    finally:
        kernels.remove()
    OP(q, q, q)
    assert in_place_of_torchs == [(0.25, True, 0.5), (0.0, False, None)]
    kernels.remove()  # once more does nothing


def test_what_tkq_takes_does_not_come_there(in_place_of_torchs, monkeypatch):
    mine = (torch.ones(1), torch.ones(1), None, None, 3, 3, *(torch.ones(1) for _ in range(3)))
    monkeypatch.setitem(sdpa_kernels.OPS, "_scaled_dot_product_flash_attention", lambda *args, **options: mine)
    kernels = sdpa.Kernels("CPU")
    q = torch.randn(1, 2, 3, 8)
    found = OP(q, q, q)
    kernels.remove()
    assert found[4] == 3 and not in_place_of_torchs


def state():
    return registry.current_flash_attention_impl(), registry._cur_sdpa_kernel_backends(with_priority=True)


def test_enable_and_disable():
    before = state()
    handle = sdpa.enable()
    assert registry.current_flash_attention_impl() == "tkq"
    sdpa.enable().remove()  # of what was enabled: no change
    assert registry.current_flash_attention_impl() == "tkq"
    handle.remove()
    assert state() == before
    handle.remove()
    sdpa.enable()
    sdpa.disable()
    assert state() == before
    sdpa.disable()
    with sdpa.enabled():
        assert registry.current_flash_attention_impl() == "tkq"
    assert state() == before


def test_blocks_that_overlap():
    """As those of two threads do: tkq stays until the last ends, whichever was first."""
    before = state()
    for first_to_end in (0, 1):
        blocks = [contextlib.ExitStack() for _ in range(2)]
        for block in blocks:
            block.enter_context(sdpa.enabled())
        blocks.pop(first_to_end).close()
        assert registry.current_flash_attention_impl() == "tkq"
        blocks.pop().close()
        assert state() == before


def test_a_block_and_a_handle_that_overlap():
    before = state()
    with sdpa.enabled():
        handle = sdpa.enable()  # for the process: it stays behind the block
    assert registry.current_flash_attention_impl() == "tkq"
    with sdpa.enabled() as block:
        handle.remove()
        assert registry.current_flash_attention_impl() == "tkq"
        block.remove()
        assert state() == before
        handle = sdpa.enable()  # the block that ends has nothing to do with it
    assert registry.current_flash_attention_impl() == "tkq"
    with sdpa.enabled():
        sdpa.disable()
        assert state() == before
    handle.remove()
    assert state() == before


def test_blocks_of_many_threads():
    before, seen = state(), []

    def work():
        for _ in range(50):
            with sdpa.enabled():
                seen.append(registry.current_flash_attention_impl())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(seen) == {"tkq"} and len(seen) == 200 and state() == before


def test_flash_comes_first_meanwhile():
    order = [registry.SDPBackend.CUDNN_ATTENTION, registry.SDPBackend.FLASH_ATTENTION, registry.SDPBackend.MATH]
    with registry.sdpa_kernel(order, set_priority=True):
        before = state()
        with sdpa.enabled():
            assert state()[1] == [order[1], order[0], order[2]]
        assert state() == before
    with registry.sdpa_kernel(registry.SDPBackend.MATH), sdpa.enabled():  # what is ruled out stays so
        assert state()[1] == [registry.SDPBackend.MATH]


def test_where_cuda_cannot_start(monkeypatch):
    """In a forked process, or on a GPU that is full: tkq is enabled and goes again, for what can run."""
    before, asked = state(), []

    def refused(*size, device, **options):
        asked.append(device)
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", refused)
    handle = sdpa.enable()
    assert registry.current_flash_attention_impl() == "tkq"
    handle.remove()
    assert state() == before
    with sdpa.enabled():
        assert registry.current_flash_attention_impl() == "tkq"
    assert state() == before and asked == ["cuda", "cuda"]


def test_nothing_stays_where_it_cannot_be_enabled(monkeypatch):
    def refused(*args, **options):
        raise RuntimeError("no such kernel")

    with registry.sdpa_kernel([registry.SDPBackend.CUDNN_ATTENTION, registry.SDPBackend.FLASH_ATTENTION],
                              set_priority=True):
        before = state()
        with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="no such kernel"):
            patched.setattr(sdpa, "Kernels", refused)
            sdpa.enable()
        assert state() == before
        with sdpa.enabled():
            assert registry.current_flash_attention_impl() == "tkq"
        assert state() == before


class Other:
    def __init__(self):
        self.removed = False

    def remove(self):
        self.removed = True


def test_another_implementation_stays_below_and_comes_back(monkeypatch):
    made = []
    monkeypatch.setitem(registry._registry._FLASH_ATTENTION_IMPLS, "other", lambda: made.append(Other()) or made[-1])
    registry.activate_flash_attention_impl("other")
    try:
        with sdpa.enabled():
            assert [x.removed for x in made] == [True, False]  # its kernels were put back, below
        assert registry.current_flash_attention_impl() == "other"
        assert [x.removed for x in made] == [True, True, False]
        handle = sdpa.enable()
        registry.activate_flash_attention_impl("other")  # someone else's wish: ours is not active any more
        handle.remove()
        assert registry.current_flash_attention_impl() == "other"
    finally:
        registry.restore_flash_attention_impl()
    assert all(x.removed for x in made)


def test_the_signatures_are_torchs():
    import inspect

    for name, ours in sdpa_kernels.OPS.items():
        op = getattr(torch.ops.aten, name, None)
        if op is None:
            continue
        theirs, mine = op.default._schema.arguments, inspect.signature(ours).parameters
        names = [a.name for a in theirs]
        assert names == [n for n in mine if n in names], name
        keywords = {a.name for a in theirs if a.kwarg_only}
        assert {n for n, p in mine.items() if p.kind == p.KEYWORD_ONLY and n in names} == keywords, name
