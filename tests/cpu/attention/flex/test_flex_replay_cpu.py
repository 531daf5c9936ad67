"""flex_attention called again: its launches come from C, as they would from Python, with all that has changed since.
Kernels are notes, and CPU tensors pose as a GPU's."""
import functools
import operator

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask

import tkq
from tests.cpu.runtime.test_calls import launches  # noqa: F401  a fixture
from tests.cpu.runtime.test_replay_ops import kernels  # noqa: F401  a fixture
from tkq.attention.flex import attend, launch
from tkq.attention.flex.backward import capture_launch
from tkq.attention.flex.backward import launch as backward_launch
from tkq.runtime.call import replay
from tkq.runtime.compile import link

pytestmark = pytest.mark.skipif(link.compiler() is None, reason="no C compiler")

B, H, S, D = 2, 2, 256, 64
WINDOW = 7
_kept: list = []


def keep(*tensors):
    """Tensors whose addresses count: none is freed, so that no other has its address."""
    _kept.extend(tensors)
    return tensors[0] if len(tensors) == 1 else tensors


FLAGS, ONE = keep(torch.arange(S) % 3 == 0, torch.tensor(0.5))
IDS = keep(torch.arange(B * S, dtype=torch.int32).view(B, S) // 40)


def causal(b, h, q, kv):
    return q >= kv


def document(b, h, q, kv):
    return (q >= kv) & (IDS[b, q] == IDS[b, kv])


def biased(score, b, h, q, kv):
    return torch.where(FLAGS[kv], score * ONE, score + WINDOW)


def of(*shape):
    return keep(torch.randn(shape).bfloat16())


def operands(heads=H, packed=False):
    if packed:
        return of(B, S, 3 * H, D).transpose(1, 2).split(H, 1)
    return of(B, H, S, D), of(B, heads, S, D), of(B, heads, S, D)


LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks", "q_indices",
         "full_q_num_blocks", "full_q_indices")


def kept_mask(mask):
    keep(*[x for name in LISTS if (x := getattr(mask, name)) is not None])
    return mask


def mask_of(mask_mod, batch=None, size=128):
    return kept_mask(create_block_mask(mask_mod, batch, None, S, S, "cpu", size))


MASK, OF_EACH, SMALL = mask_of(causal), mask_of(document, B), mask_of(causal, size=64)
HALF = BlockMask.from_kv_blocks(MASK.kv_num_blocks, MASK.kv_indices, BLOCK_SIZE=128, mask_mod=causal,
                                seq_lengths=(S, S), compute_q_blocks=False)  # and the backward makes lists
CALLS = {
    "nothing": lambda q, k, v: tkq.flex_attention(q, k, v),
    "a mask": lambda q, k, v: tkq.flex_attention(q, k, v, None, MASK),
    "a mask of each": lambda q, k, v: tkq.flex_attention(q, k, v, None, OF_EACH, return_lse=True),
    "an lse of return_aux": lambda q, k, v: [x if isinstance(x, torch.Tensor) else x.lse for x in tkq.flex_attention(
        q, k, v, None, MASK, return_aux=AuxRequest(lse=True))],
    "both": lambda q, k, v: tkq.flex_attention(q, k, v, biased, OF_EACH, scale=0.25),
    "blocks of 64": lambda q, k, v: tkq.flex_attention(q, k, v, None, SMALL),
    "no full blocks": lambda q, k, v: tkq.flex_attention(q, k, v, biased, HALF),
    "few heads": lambda q, k, v: tkq.flex_attention(q, k[:, :1], v[:, :1], None, MASK, enable_gqa=True),
    "flash_attn": lambda q, k, v: tkq.flash_attn(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=MASK),
    "flash_attn, capped": lambda q, k, v: tkq.flash_attn(
        *(x.transpose(1, 2) for x in (q, k, v)), mask_mod=document, score_mod=biased, softcap=9.0, return_lse=True)}


@pytest.fixture
def launched(kernels):  # noqa: F811
    """launched(call): the launches that call() makes; of tensors that are not kept the address is their place among the
    results, or None."""
    def launches_of(call):
        kernels.clear()
        results = call()
        results = results if isinstance(results, (tuple, list)) else (results,)
        made = {x.data_ptr(): i for i, x in enumerate(results) if x is not None}

        def told(given):
            if isinstance(given, tuple) and len(given) == 4 and isinstance(given[2], str):
                return *given[:3], str(given[3]) if is_kept(given[3]) else ("made", made.get(given[3]))
            return tuple(map(told, given)) if isinstance(given, tuple) else repr(given)  # -0.0 == 0.0

        return [(recipe, told(given)) for recipe, given in kernels]

    return launches_of


def is_kept(address):
    """Is it a tensor's, or within it?"""
    return any(x.data_ptr() <= address < x.data_ptr() + x.untyped_storage().nbytes() for x in _kept)


def in_python(monkeypatch, *modules):
    """Whoever launches in Python fails."""
    for module in modules:
        monkeypatch.setattr(module, "run", lambda *args: pytest.fail("goes the long way"))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_again(launched, monkeypatch, name, packed):
    """With other tensors: from C the same launch as from Python."""
    call, given = CALLS[name], operands(packed=packed)
    with torch.no_grad():
        wanted = launched(lambda: call(*given))
        replay.clear()
        for _ in range(3):
            call(*operands(packed=packed))
        in_python(monkeypatch, launch)
        assert launched(lambda: call(*given)) == wanted and len(wanted) == 1


@pytest.mark.parametrize("name", [x for x in CALLS if x not in ("few heads", "blocks of 64")])
def test_gradients_again(launched, monkeypatch, name):
    """Also of calls that autograd records. (Lists that are made for a backward are made each time.)"""
    given, do = operands(), of(B, H, S, D)
    leaves = [x.requires_grad_() for x in given]

    def call(leaves=leaves, do=do):
        o = CALLS[name](*leaves)
        o = o[0] if isinstance(o, (tuple, list)) else o
        do = do.transpose(1, 2) if name.startswith("flash") else do
        return (o, *torch.autograd.grad(o, leaves, do))

    wanted = launched(call)
    replay.clear()
    assert len(wanted) == 2 + (name == "no full blocks")
    for _ in range(3):
        call([x.requires_grad_() for x in operands()], of(B, H, S, D))
    in_python(monkeypatch, *([launch] if name == "no full blocks" else [launch, backward_launch]))
    for what in ("trace", "blocks_of"):
        monkeypatch.setattr(attend, what, lambda *args: pytest.fail("is looked at again"))
    assert launched(call) == wanted


def test_gradients_of_other_tensors(launched):
    """Those of query are asked for, or not, or lse is used."""
    given, do = operands(), of(B, H, S, D)

    def call(of_q=True, with_lse=False):
        leaves = [x.detach().requires_grad_(of_q or x is not given[0]) for x in given]
        o, lse = tkq.flex_attention(*leaves, biased, MASK, return_lse=True)
        used, grads = ((o, lse), (do, lse.detach())) if with_lse else ((o,), (do,))
        return (o, lse, *torch.autograd.grad(used, [x for x in leaves if x.requires_grad], grads))

    for _ in range(4):
        call()
    for how in (dict(of_q=False), dict(with_lse=True)):
        found = launched(lambda how=how: call(**how))
        replay.clear()
        assert found == launched(lambda how=how: call(**how)) and len(found) == 2
        for _ in range(4):
            call(), call(**how)
        assert found == launched(lambda how=how: call(**how))


def test_gradients_of_captured_tensors_again(launched, monkeypatch):
    learned = keep(torch.rand(H), torch.tensor(0.5))

    def call(slopes, one):
        leaves = slopes.requires_grad_(), one.requires_grad_()
        o = tkq.flex_attention(*given, lambda score, b, h, q, kv: score * one + slopes[h] * kv, MASK)
        return (o, *torch.autograd.grad(o, leaves, do))

    given, do = operands(), of(B, H, S, D)
    wanted = launched(lambda: call(*learned))
    replay.clear()
    for _ in range(3):
        call(torch.rand(H), torch.tensor(0.5))
    in_python(monkeypatch, launch, backward_launch, capture_launch)
    assert launched(lambda: call(*learned)) == wanted and len(wanted) == 2
    monkeypatch.undo()
    assert launched(lambda: call(*learned)) == wanted  # of the same call, with and without
    slopes, one = (x.detach() for x in learned)
    for leaves in ((slopes,), (slopes, one)):  # those that require one now
        leaves[-1].requires_grad_()
        o = tkq.flex_attention(*given, lambda score, b, h, q, kv: score * one + slopes[h] * kv, MASK)
        assert o.requires_grad and all(x.shape == leaf.shape for x, leaf in zip(
            torch.autograd.grad(o, leaves, do), leaves))
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(NotImplementedError, match="deterministic"):
            call(*learned)
    finally:
        torch.use_deterministic_algorithms(False)


# ---- nothing is served stale -----------------------------------------------------------------------------------------


def within(n):
    return lambda b, h, q, kv: q - kv < n


def above(table):
    return lambda b, h, q, kv: table[q] >= kv


def helped(helper):
    return lambda b, h, q, kv: helper(b, h, q, kv)


def above_inverse(zero):
    return lambda b, h, q, kv: 1 / (q * 0 + zero) > kv


def first_of(numbers):
    return lambda b, h, q, kv: q - kv < numbers[0]


def of_itself(other):
    def mask(b, h, q, kv):
        return q >= kv if other is mask else q <= kv

    return mask


def places():
    """(a function that is one of its two cells, the other a number; a change of places)"""
    def of(first, second):
        def mask(b, h, q, kv):
            return q - kv < first if second is mask else kv - q < second

        return mask

    mask = of(None, 5)
    first, second = (mask.__closure__[mask.__code__.co_freevars.index(name)] for name in ("first", "second"))
    first.cell_contents = mask

    def change():
        first.cell_contents, second.cell_contents = 5, mask

    return mask, change


def in_cell(make, old, new, name=None):
    """(a function that closes over what is old, a change)"""
    function = make(old)
    cell = function.__closure__[function.__code__.co_freevars.index(name) if name else 0]
    return function, lambda: setattr(cell, "cell_contents", function if new is ... else new)


def of_defaults(name, value):
    def mask(b, h, q, kv, n=5, *, most=6):
        return (q - kv < n) & (q - kv < most)

    return mask, lambda: setattr(mask, name, value)


def of_attribute():
    def mask(b, h, q, kv):
        return q - kv < mask.n

    mask.n = 5
    return mask, lambda: setattr(mask, "n", 6)


def changes():
    """{what changes: (a mask function, the change)}"""
    numbers, inner, settings = [2, 3], [(5,)], {"window": 4}
    other = (lambda b, h, q, kv, n=5, *, most=6: q - kv < n + most).__code__
    partial = functools.partial(lambda n, b, h, q, kv: q - kv < n, 3)
    return {
        "cell": in_cell(within, 3, 4), "type of a cell": in_cell(within, 3, 3.0), "flag": in_cell(within, True, 1),
        "sign of a zero": in_cell(above_inverse, 0.0, -0.0),
        "tensor": in_cell(above, keep(torch.arange(S)), keep(torch.arange(S) // 2)),
        "function": in_cell(helped, within(4), causal), "cell of a function": in_cell(helped, within(4), within(5)),
        "itself": in_cell(of_itself, None, ..., "other"), "places": places(),
        "default": of_defaults("__defaults__", (8,)), "default by name": of_defaults("__kwdefaults__", {"most": 1}),
        "code": of_defaults("__code__", other), "attribute": of_attribute(),
        "what globals() has": (lambda b, h, q, kv: q - kv < globals()["WINDOW"],
                               lambda: operator.setitem(globals(), "WINDOW", WINDOW + 1)),
        "global": (lambda b, h, q, kv: q - kv < WINDOW, lambda: operator.setitem(globals(), "WINDOW", WINDOW + 1)),
        "list": (first_of(numbers), lambda: operator.setitem(numbers, 0, 9)),
        "tuple in a list": (lambda b, h, q, kv: q - kv < inner[0][0], lambda: operator.setitem(inner, 0, (6,))),
        "dictionary": (lambda b, h, q, kv: q - kv < settings["window"], lambda: settings.update(window=5)),
        "partial": (partial, lambda: partial.__setstate__((partial.func, (9,), {}, {})))}


@pytest.mark.parametrize("of_mask, recorded", [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize("name", changes())
def test_what_changes_is_seen(launched, name, of_mask, recorded):
    """After calls that were remembered, and known again, the launch is what it is where nothing is remembered."""
    function, change = changes()[name]
    given, do = [x.requires_grad_(recorded) for x in operands()], of(B, H, S, D)
    score = None if of_mask else lambda score, b, h, q, kv: torch.where(function(b, h, q, kv), score, score * 2)
    mask = BlockMask.from_kv_blocks(MASK.kv_num_blocks, MASK.kv_indices, BLOCK_SIZE=128, seq_lengths=(S, S),
                                    mask_mod=function if of_mask else causal)

    def call():
        o = tkq.flex_attention(*given, score, mask)
        return (o, *torch.autograd.grad(o, given, do)) if recorded else o

    with torch.set_grad_enabled(recorded):
        before = [launched(call) for _ in range(5)]
        assert before[1:] == before[:1] * 4
        change()
        found = launched(call)
        replay.clear()
        wanted = launched(call)
        assert found == wanted and found != before[0]


def test_a_captured_tensor_s_own_address_counts(launched):
    """A tensor that is another one of the same sizes, and a mask's lists that are."""
    given, old = operands(), keep(torch.arange(S), MASK.kv_num_blocks.clone(), MASK.kv_indices.clone())
    (cell, num, indices), new = old, keep(*[x.clone() for x in old])
    mask = kept_mask(BlockMask.from_kv_blocks(num, indices, BLOCK_SIZE=128, seq_lengths=(S, S),
                                              mask_mod=lambda b, h, q, kv: cell[q] >= kv))
    call = lambda: tkq.flex_attention(*given, None, mask)

    def addresses(of):
        """Those among what a kernel is given, and numbers."""
        if isinstance(of, tuple):
            return [x for part in of for x in addresses(part)]
        return [int(of)] if isinstance(of, str) and of.isdigit() else []

    with torch.no_grad():
        for _ in range(4):
            first = addresses(launched(call)[0][1])
        cell, mask.kv_num_blocks, mask.kv_indices = new
        second = addresses(launched(call)[0][1])
    for a, b in zip(old, new):
        assert a.data_ptr() in first and b.data_ptr() not in first
        assert b.data_ptr() in second and a.data_ptr() not in second


def wrong_list(name, dtype=torch.int64):
    mask = mask_of(causal)
    setattr(mask, name, getattr(mask, name).to(dtype))
    return mask


BAD = {
    "enable_gqa": dict(enable_gqa=0), "return_lse": dict(return_lse=0), "a word": dict(scale="1"),
    "scale": dict(scale=True), "infinite": dict(scale=float("inf")), "score_mod": dict(score_mod=3),
    "heads": dict(heads=1), "columns": dict(q=lambda q: q[..., :36]), "rows": dict(q=lambda q: q[:, :, 1:]),
    "dtype": dict(q=lambda q: q.float()), "dtypes": dict(q=lambda q: q.half()), "no tensor": dict(q=lambda q: 3),
    "sparse": dict(q=lambda q: q.to_sparse()), "dimensions": dict(q=lambda q: q[0]),
    "meta": dict(q=lambda q: q.to("meta")),
    "a list of queries": dict(block_mask=wrong_list("q_indices")), "a list": dict(block_mask=wrong_list("kv_indices")),
    "a captured tensor": dict(score_mod=(lambda x: lambda score, b, h, q, kv: score + x[kv])(
        torch.ones(S, device="meta"))),
    "no mask": dict(block_mask=3), "aux": dict(return_aux=True)}


def test_a_score_without_a_slope_is_refused_after_calls_that_are_known(launched):
    """Those had no gradient."""
    given, score = operands(), lambda score, b, h, q, kv: score % (score * score + 1)
    with torch.no_grad():
        for _ in range(4):
            launched(lambda: tkq.flex_attention(*given, score, MASK, return_lse=True))
    for _ in range(4):
        with pytest.raises(NotImplementedError, match="no gradient of mod"):
            tkq.flex_attention(given[0].requires_grad_(), *given[1:], score, MASK, return_lse=True)


@pytest.mark.parametrize("recorded", (False, True))
@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_refused_after_calls_that_are_known(launched, name, recorded):
    def call(heads=H, q=lambda q: q, score_mod=biased, block_mask=MASK, **options):
        given = [x.requires_grad_(recorded) for x in operands(heads)]
        return tkq.flex_attention(q(given[0]), *given[1:], score_mod, block_mask, **options)

    def said():
        with pytest.raises((TypeError, ValueError, NotImplementedError)) as error:
            call(**BAD[name])
        return str(error.value)

    with torch.set_grad_enabled(recorded):
        first = said()
        for _ in range(5):
            launched(call)
        assert said() == first
