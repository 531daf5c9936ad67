"""From tensors to a launch, without a GPU: which launcher a call takes, what it is called with, what needs a copy."""
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tkq.dtypes import WIDTH
from tkq.norms import alignment, launch
from tkq.norms import config as norms_config
from tkq.norms import plan as norms
from tkq.norms.backward import per_head_plan
from tkq.norms.backward.per_head_plan import PerHeadSpec
from tkq.norms.launch import Call
from tkq.norms.spec import MAX_N, OUT_WIDTH, NormSpec
from tkq.reduction import geometry
from tkq.runtime.device import arch

E4M3 = torch.float8_e4m3fn


class Kernel:
    """In a launcher's place: notes what it is called with, and refuses what a compiled function would."""

    def __init__(self, recipe):
        self.spec, self.config = recipe.args
        self.calls = []

    def __call__(self, *args):
        tensors = [a for a in args if isinstance(a, torch.Tensor) and a.shape[-1] == self.spec.N]
        if any(t.data_ptr() % min(16, self.spec.vector * t.element_size()) for t in tensors):
            raise ValueError("misaligned")
        if args[1] is not None and args[1].shape[-1] != self.spec.N:
            raise ValueError("weight")
        self.calls.append(args)


@pytest.fixture
def kernels(monkeypatch):
    """The launchers that calls make, in order."""
    made = []

    def function(recipe):
        made.append(Kernel(recipe))
        return made[-1]

    monkeypatch.setattr(launch.runtime, "function", function)
    monkeypatch.setattr(arch, "require_hopper", lambda device: None)
    monkeypatch.setattr(launch, "_launch_cache", {})
    monkeypatch.setattr(launch, "_launchers", {})
    return made


X = torch.zeros(6, 64).bfloat16()
W = torch.ones(64).bfloat16()


def plain(kind, x, weight, bias, eps):
    return launch.norm(Call(kind, eps), x, weight, bias, None)[0]


def with_statistics(kind, x, weight, bias, eps):
    y, _, rstd, mean, _ = launch.norm(Call(kind, eps, stats=True), x, weight, bias, None)
    return y, rstd, mean


def test_a_plain_call_has_a_kernel_without_options(kernels):
    y = plain("rmsnorm", X, W, None, 1e-5)
    assert y.shape == X.shape and y.dtype == X.dtype
    assert kernels[0].spec == NormSpec("rmsnorm", 64, "bf16", "bf16", None, 8) and kernels[0].spec.plain
    x, w, b, out, eps = kernels[0].calls[0]
    assert x is X and w is W and b is None and out is y and eps == 1e-5
    plain("rmsnorm", torch.zeros(9, 64).bfloat16(), W, None, 1e-6)
    assert len(kernels) == 1 and len(kernels[0].calls) == 2
    plain("layernorm", X, W, None, 1e-5)
    plain("rmsnorm", X.float(), W, None, 1e-5)
    plain("rmsnorm", X, W.float(), None, 1e-5)
    plain("rmsnorm", X[:, :32], W[:32], None, 1e-5)
    assert len(kernels) == 5


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_statistics_come_from_a_kernel_of_their_own(kernels, kind):
    for i in range(2):
        y, rstd, mean = with_statistics(kind, X, W, None, 1e-5)
        assert len(kernels) == 1 and kernels[0].spec.stats and not kernels[0].spec.plain
        assert rstd.shape == (6,) and rstd.dtype == torch.float32 and (mean is None) == (kind == "rmsnorm")
        args = kernels[0].calls[i]
        assert args[0] is X and args[3] is y and args[6] is rstd and args[7] is mean and args[9] == 1e-5
        assert len(args) == 11 and all(a is None for a in (args[4], args[5], args[8], args[10]))
    assert with_statistics(kind, X, W, None, 1e-6)[1].shape == (6,)
    assert len(kernels) == 1, "the same kernel for another eps"


def test_options_reach_the_kernel(kernels):
    residual = torch.zeros(6, 64)
    call = Call("layernorm", 1e-5, 1.0, torch.float16, torch.float32, True)
    for i in range(2):
        y, total, rstd, mean, scale = launch.norm(call, X, W, W, residual)
        x, w, b, out, r, t, rs, m, sc, eps, offset = kernels[0].calls[i]
        assert (x is X, w is W, b is W, out is y, r is residual, t is total, rs is rstd, m is mean) == (True,) * 8
        assert scale is None is sc and eps == 1e-5 and offset == 1.0
        assert y.dtype == torch.float16 and total.dtype == torch.float32
    assert len(kernels) == 1
    assert kernels[0].spec == NormSpec("layernorm", 64, "bf16", "bf16", "bf16", 4, "fp32", "fp32", "fp16", None, True,
                                       True)


@pytest.mark.parametrize("granularity, shape, strides", [("row", (6, 1), (1, 1)), ("1x128", (6, 3), (1, 8))])
def test_scales(kernels, granularity, shape, strides):
    x = torch.zeros(2, 3, 300).bfloat16()
    q, _, _, _, scale = launch.norm(Call("rmsnorm", 1e-5, out=E4M3, scale=granularity), x, None, None, None)
    assert q.shape == x.shape and q.dtype == E4M3
    assert scale.shape == shape and scale.stride() == strides and scale.dtype == torch.float32
    args = kernels[0].calls[0]
    assert args[3].shape == (6, 300) and args[8] is scale
    assert kernels[0].spec.scale == granularity and kernels[0].spec.out == "e4m3"


def test_narrower_accesses_are_found_and_remembered(kernels):
    wide = torch.zeros(6, 72).bfloat16()
    plain("rmsnorm", wide[:, :64], W, None, 1e-5)
    plain("rmsnorm", wide[:, 4:68], W, None, 1e-5)
    plain("rmsnorm", wide[:, 1:65], W, None, 1e-5)
    plain("rmsnorm", wide[:, :64], torch.ones(65).bfloat16()[1:], None, 1e-5)
    assert [k.spec.vector for k in kernels] == [8, 4, 1]
    plain("rmsnorm", wide[:, :64], W, None, 1e-5)
    plain("rmsnorm", wide[:, 4:68], W, None, 1e-5)
    assert [len(k.calls) for k in kernels] == [2, 2, 2]


def test_a_refused_call_allocates_its_result_once(kernels, monkeypatch):
    wide, made = torch.zeros(6, 72).bfloat16(), []
    plain("rmsnorm", wide[:, :64], W, None, 1e-5)
    real = launch.allocate
    monkeypatch.setattr(launch, "allocate", lambda *args: made.append(real(*args)) or made[-1])
    y = plain("rmsnorm", wide[:, 1:65], W, None, 1e-5)
    assert len(made) == 1 and y.data_ptr() == made[0][0].data_ptr() == kernels[1].calls[0][3].data_ptr()


def test_what_is_refused_is_named_and_leaves_nothing_behind(kernels):
    plain("rmsnorm", X, W, None, 1e-5)
    for _ in range(2):
        with pytest.raises(ValueError, match="weight: shape is"):
            plain("rmsnorm", X, W[:32], None, 1e-5)
        with pytest.raises(ValueError, match="residual: shape is"):
            launch.norm(Call("rmsnorm", 1e-5), X, W, None, X[:3])
        with pytest.raises(TypeError, match="out: got dtype int8"):
            launch.norm(Call("rmsnorm", 1e-5, out=torch.int8), X, W, None, None)
    plain("rmsnorm", X, W, None, 1e-5)
    assert len(kernels) == 1 and len(kernels[0].calls) == 2


def test_no_rows_launch_nothing(kernels):
    for shape in ((0, 64), (2, 0, 64)):
        x = torch.zeros(shape).bfloat16()
        assert plain("rmsnorm", x, W, None, 1e-5).shape == shape
        y, total, rstd, _, _ = launch.norm(Call("rmsnorm", 1e-5, total=torch.float32, stats=True), x, W, None, x)
        assert y.shape == total.shape == shape and rstd.shape == (0,)
    scale = launch.norm(Call("rmsnorm", 1e-5, out=E4M3, scale="1x128"), x, W, None, x)[4]
    assert scale.shape == (0, 1) and not kernels


# ---- rows ----------------------------------------------------------------------------------------------------------


def shared(a, b):
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


QKV = torch.zeros(2, 5, 3, 4, 16)


@pytest.mark.parametrize("x, weight, heads, shape", [
    (torch.zeros(6, 16), None, None, (6, 16)), (torch.zeros(6, 24)[:, :16], None, None, (6, 16)),
    (torch.zeros(2, 3, 16), None, None, (6, 16)), (torch.zeros(16), None, None, (1, 16)),
    (torch.zeros(2, 5, 16)[:, :4], None, "rows", (2, 4, 16)), (QKV[:, :, 1], None, "rows", (10, 4, 16)),
    (QKV[:, :, 1], torch.ones(4, 16), "weight", (10, 4, 16)), (torch.zeros(4, 16), torch.ones(4, 16), "weight",
                                                               (1, 4, 16)),
    (QKV[:, :, 1, 2], None, None, (10, 16)), (QKV[:, 1, 0], None, "rows", (2, 4, 16))])
def test_rows_are_read_in_place(x, weight, heads, shape):
    (rows, residual), found = launch._rows(x, None, weight)
    assert found == heads and rows.shape == shape and shared(rows, x) and residual is None
    (rows, residual), found = launch._rows(x, x, weight)
    assert found == heads and residual.shape == shape and shared(residual, x)


def test_rows_that_need_more_than_two_strides_are_copied():
    x = QKV[:, 1:4, 0].transpose(1, 2)
    (rows, _), heads = launch._rows(x, None, None)
    assert heads is None and rows.shape == (24, 16) and not shared(rows, x)
    (rows, _), heads = launch._rows(QKV[:, 1:4, 0], None, torch.ones(4, 16))
    assert heads == "weight" and rows.shape == (6, 4, 16) and not shared(rows, QKV)


def test_x_and_residual_lie_the_same_way():
    x = torch.zeros(2, 5, 16)
    (rows, residual), heads = launch._rows(x, torch.zeros(2, 6, 16)[:, 1:], None)
    assert heads == "rows" and rows.shape == residual.shape == (2, 5, 16)


@pytest.mark.parametrize("R, H, most", [(10, None, 3), (7, 4, 9), (5, 1, 2), (3, 8, 5)])
def test_each_row_is_in_one_launch(R, H, most, monkeypatch):
    monkeypatch.setattr(launch, "_MAX_ROWS", most)
    M = R * (H or 1)
    x = torch.arange(R * (H or 1) * 4.0).view(*((R, 4) if H is None else (R, H, 4)))
    y, scale = x.view(M, 4), torch.arange(M * 1.0).view(M, 1)
    w, rstd = torch.ones(H or 1, 4), torch.arange(M * 1.0)
    parts = launch._parts((x, w, None, y, x, y, rstd, None, scale, 1e-5, None))
    assert torch.equal(torch.cat([p[0] for p in parts]), x) and torch.equal(torch.cat([p[3] for p in parts]), y)
    assert torch.equal(torch.cat([p[8] for p in parts]), scale) and torch.equal(torch.cat([p[6] for p in parts]), rstd)
    assert all(p[1] is w and p[9] == 1e-5 and p[0].shape[0] * (H or 1) == p[3].shape[0] for p in parts)
    assert all(p[3].shape[0] <= max(most, H or 1) for p in parts)


@pytest.mark.parametrize("streams, vector", [
    ([torch.zeros(4, 64).bfloat16(), torch.zeros(4, 64)], 4), ([torch.zeros(4, 64).bfloat16()] * 2, 8),
    ([torch.zeros(4, 64).bfloat16(), torch.zeros(4, 64, dtype=E4M3)], 8), ([torch.zeros(4, 64).bfloat16(),
                                                                           torch.zeros(4, 66).bfloat16()[:, 2:]], 2),
    ([torch.zeros(3, 4, 64).bfloat16()[:, :, :24], torch.zeros(3, 4, 24)], 4),
    ([torch.zeros(3, 4, 66).bfloat16()[:, :, :24]], 2)])
def test_the_access_fits_all_streams(streams, vector):
    assert alignment.vector(streams) == vector


# ---- plans ---------------------------------------------------------------------------------------------------------

DTYPES = st.sampled_from(sorted(WIDTH))
OPTIONAL = st.one_of(st.none(), DTYPES)
COLUMNS = st.one_of(st.integers(1, MAX_N), st.integers(1, 4096), st.integers(1, MAX_N // 8).map(lambda n: 8 * n),
                    st.integers(0, 18).map(lambda e: 2**e))


@st.composite
def specs(draw):
    kind, x, N = draw(st.sampled_from(["rmsnorm", "layernorm"])), draw(DTYPES), draw(COLUMNS)
    scale = draw(st.sampled_from([None, "row", "1x128"]))
    weight, residual, total = draw(OPTIONAL), draw(OPTIONAL), draw(OPTIONAL)
    out = "e4m3" if scale else draw(OPTIONAL)
    widest = geometry.vector(N, max(OUT_WIDTH[t] for t in (x, residual, total, out) if t))
    vector = draw(st.sampled_from([v for v in (1, 2, 4, 8) if widest % v == 0]))
    heads = draw(st.sampled_from([None, "rows", *(["weight"] if weight else [])]))
    return NormSpec(kind, N, x, weight, draw(OPTIONAL), vector, residual, total, out, scale,
                    draw(st.booleans()) and weight is not None, draw(st.booleans()), heads)


@given(specs())
def test_every_spec_has_a_config_that_fits(spec):
    config = norms.plan(spec)
    norms_config.check(spec, config)
    t = config.tile(spec)
    assert t.cols * t.cluster >= spec.N and t.threads == config.threads <= 1024
    assert norms_config.smem_bytes(spec, config) <= 227 * 1024
    if spec.scale:
        assert config.load == "registers", "results wait in registers"
        assert t.per_thread <= 32 or (t.per_thread <= 64 and (t.threads, t.cluster) == (128, 16))
    elif config.load == "registers":
        assert t.per_thread * max(spec.loaded, 32) <= 64 * 32 * 2
    if spec.scale == "1x128":
        # 128 columns lie in neighbouring lanes of one block, or in several vectors of all lanes
        step = t.vector * t.threads_per_row
        assert step % 128 == 0 or 128 % step == 0
        assert t.cluster == 1 or t.cols % 128 == 0
        assert t.vector >= 4 or t.threads_per_row <= 32 or 128 // t.vector % 32 == 0


@given(specs())
def test_each_scale_has_one_writer(spec):
    """The rule by which a thread of the kernel writes a block's scale, followed for every thread."""
    if spec.scale != "1x128" or spec.N > 20000:
        return
    t = norms.plan(spec).tile(spec)
    together = max(1, 128 // (t.vector * t.threads_per_row))
    written = []
    for rank in range(t.cluster):
        for thread in range(t.threads_per_row):
            first = rank * (t.cols if t.cluster > 1 else 0) + thread * t.vector
            for j in range(0, t.blocks, together):
                column = first + j * t.vector * t.threads_per_row
                if first % 128 == 0 and column < spec.N:
                    written.append(column // 128)
    assert sorted(written) == list(range(math.ceil(spec.N / 128)))


@pytest.mark.parametrize("options", [
    dict(residual="bf16", total="bf16"), dict(out="e4m3", scale="row"), dict(out="e4m3", scale="1x128"),
    dict(stats=True)])
@pytest.mark.parametrize("N", [1024, 4096, 32768, 262144])
def test_variants_are_valid_and_begin_with_the_plan(options, N):
    spec = NormSpec("rmsnorm", N, "bf16", "bf16", None, 8, **options)
    found = norms.variants(spec)
    assert found[0] == norms.plan(spec) and len(found) == len(set(found)) >= 4
    for config in found:
        norms_config.check(spec, config)


@pytest.mark.parametrize("error, words, bad", [
    (TypeError, "residual: got dtype int8", dict(residual="int8")), (TypeError, "total", dict(total="e4m3")),
    (TypeError, "out: got dtype e4m3", dict(out="e4m3")), (ValueError, "scale: got 'row'", dict(scale="row")),
    (ValueError, "scale: got 'tensor'", dict(scale="tensor", out="e4m3")), (ValueError, "heads", dict(heads="qkv")),
    (ValueError, "offset, heads", dict(heads="weight")), (ValueError, "offset, heads", dict(offset=True)),
    (ValueError, "vector", dict(residual="fp32", vector=8))])
def test_a_spec_that_is_not_supported_says_so(error, words, bad):
    with pytest.raises(error, match=words):
        NormSpec(**{**dict(kind="rmsnorm", N=64, x="bf16", vector=4), **bad})


def test_quantised_results_wait_in_registers():
    spec = NormSpec("rmsnorm", 4096, "bf16", None, None, 8, out="e4m3", scale="row")
    with pytest.raises(ValueError, match="load: got 'shared', allowed is registers for float8 results"):
        norms_config.check(spec, norms_config.Config(128, 128, load="shared"))


# ---- the backward pass of heads ------------------------------------------------------------------------------------


def heads_spec(D, vector):
    return PerHeadSpec("rmsnorm", D, "bf16", "bf16", "bf16", "bf16", None, None, "bf16", None, False, vector)


@given(st.integers(1, per_head_plan.MAX_D), st.sampled_from([1, 2, 4, 8]))
def test_every_head_has_a_config(D, vector):
    vector = math.gcd(vector, D)
    spec = heads_spec(D, vector)
    config = per_head_plan.plan(spec)
    t = config.tile(spec)
    assert t.cols >= D and t.threads == config.threads <= 512 and t.per_thread <= 8
    assert config.rows_per_thread >= 2, "so that no buffer of the exchange is written while it is read"


@given(st.integers(1, 300), st.integers(1, 130), st.sampled_from([1, 8, 33, 128, 4096]), st.sampled_from([1, 16, 132]))
def test_each_row_of_heads_belongs_to_one_group_of_its_head(R, H, D, num_sms):
    config = per_head_plan.plan(heads_spec(D, math.gcd(D, 8)))
    at_once = config.threads // config.threads_per_row
    count = per_head_plan.blocks(config, R * H, H, num_sms)
    groups = count * at_once
    assert groups % H == 0
    assert count <= max(H, num_sms * 2 * max(1, 256 // config.threads) * 2)
    steps = -(-R * H // (groups * config.rows_per_thread)) * config.rows_per_thread
    rows = [(u + k * groups, u % H) for u in range(groups) for k in range(steps) if u + k * groups < R * H]
    assert sorted(row for row, _ in rows) == list(range(R * H))
    assert all(row % H == head for row, head in rows)


@pytest.mark.parametrize("error, words, bad", [
    (NotImplementedError, "heads of 4097 columns", dict(D=4097)), (TypeError, "dy: got dtype e4m3", dict(dy="e4m3")),
    (ValueError, "vector", dict(vector=16)), (ValueError, "kind: got 'softmax'", dict(kind="softmax"))])
def test_heads_that_are_not_supported_say_so(error, words, bad):
    given_ = dict(kind="rmsnorm", D=64, dy="bf16", x="bf16", weight="bf16", dx="bf16", dresidual=None,
                  dresidual_out=None, dweight=None, dbias=None, offset=False, vector=1)
    with pytest.raises(error, match=words):
        PerHeadSpec(**{**given_, **bad})


def test_the_machine_code_of_heads_has_wide_accesses():
    from tkq.norms.backward import per_head_ops
    from tkq.testing import sass

    if sass.nvdisasm() is None:
        pytest.skip("nvdisasm is not installed")
    first = next(k for k in sass.report(per_head_ops.recipe(heads_spec(128, 8))) if "finish" not in k.name)
    assert first.count("LDG.E.128") == 9, "four rows at once of x and dy, and their weight"
    assert first.count("STG.E.128") == 6, "four rows of dx, eight columns of dweight"
    assert first.spill_loads + first.spill_stores + first.stack == 0
