"""ReductionBase and utils on the GPU: kernels of the tutorial's contract, row_reduce by itself, launches."""
import pytest
import torch

from tests.helpers.rows import contract_kernels, reduction_kernels
from tkq.reduction.geometry import MAX_CLUSTER
from tkq.testing import assert_2x

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def norm(name, x, weight, eps=1e-5):
    x = x if name.startswith("RMSNorm") else x - x.mean(-1, keepdim=True)
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * rstd * weight, rstd[:, 0]


def check_norm(name, M, N, x_type, w_type, **options):
    torch.manual_seed(N)
    x, w = torch.randn(M, N, device="cuda").to(x_type) + 1, torch.randn(N, device="cuda").to(w_type)
    out, rstd = torch.full_like(x, float("nan")), torch.full((M,), float("nan"), device="cuda")
    getattr(contract_kernels, name).launch(x, w, out, rstd, 1e-5, **options)
    truth, rstd_truth = norm(name, x.double(), w.double())
    peer, rstd_peer = norm(name, x.float(), w.float())
    assert_2x(out, truth, peer.to(x_type), ulps=1, what=f"{name} N {N} {options}")
    # a thread that adds 256 squares of bf16 values one after the other ends 5e-7 of the sum too low, in every row alike
    # (a simulation in numpy gives the same); rstd is then 2 ulps too high
    assert_2x(rstd, rstd_truth, rstd_peer, ulps=4, what=f"{name} N {N} {options}: rstd", bias_ulps=2)


@pytest.mark.parametrize("w_type, totals_type", [(FP32, FP32), (BF16, BF16)])
@pytest.mark.parametrize("N", [1, 7, 64, 1000, 4098, 16384, 65536, 262144])
@pytest.mark.sampled(each_value=True)
def test_a_vector_in_the_rows_layout_and_a_number_a_row(N, w_type, totals_type):
    """The kernel of docs/write_your_own/reduction.md."""
    torch.manual_seed(N)
    for M in (1, 13):
        x, w = torch.randn(M, N, device="cuda").to(BF16) + 1, torch.randn(N, device="cuda").to(w_type)
        totals = torch.full((M + 2,), float("nan"), device="cuda", dtype=totals_type)
        reduction_kernels.WeightedSum.launch(x, w, totals[1:-1])
        truth = (x.double() * w.double()).sum(-1)
        largest = (x.double() * w.double()).abs().sum(-1).max().item()
        assert_2x(totals[1:-1], truth, (x.float() * w.float()).sum(-1).to(totals_type), what=f"N {N}", bias_ulps=1,
                  cancelled=largest)
        assert totals[[0, -1]].isnan().all()


@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("N", [64, 72, 128, 256, 1000, 1024, 3072, 4096, 4098, 4100, 8192, 16384, 32768, 40000, 65536,
                               131072, 262144])
@pytest.mark.sampled(when=lambda name, N: name == "RMSNorm" or N in (64, 1000, 4098, 8192, 16384, 40000, 131072))
def test_contract_kernels_at_every_rung(name, N):
    check_norm(name, 13, N, BF16, BF16)


@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("types", [(BF16, FP32), (FP16, BF16), (FP32, FP32), (FP32, BF16)])
@pytest.mark.sampled(when=lambda name, types: (name == "RMSNorm") == (types[0] == FP32))
def test_contract_kernels_in_other_types(name, types):
    for N in (1001 if types[0] is FP32 else 1000, 32768):
        check_norm(name, 7, N, *types)


def test_the_stream_before_eps():
    check_norm("RMSNormStreamFirst", 9, 1000, BF16, BF16)


@pytest.mark.parametrize("M, N", [(64, 64), (1, 64)])
def test_one_row_or_as_many_rows_as_columns(M, N):
    """rstd 4 bytes behind an aligned address, x's one row with a stride that is none."""
    torch.manual_seed(0)
    x = torch.randn(M, N + 1 if M == 1 else N, device="cuda").to(BF16)[:, :N]
    w, out, rstd = torch.ones(N, device="cuda", dtype=BF16), torch.full_like(x, float("nan")), torch.zeros(M + 2).cuda()
    contract_kernels.RMSNorm.launch(x, w, out, rstd[1:-1], 1e-5)
    truth, rstd_truth = norm("RMSNorm", x.double(), w.double())
    peer, rstd_peer = norm("RMSNorm", x.float(), w.float())
    assert_2x(out, truth, peer.to(BF16), ulps=1, what="out")
    assert_2x(rstd[1:-1], rstd_truth, rstd_peer, ulps=4, what="rstd", bias_ulps=2)
    assert rstd[0] == rstd[-1] == 0.0


@pytest.mark.parametrize("reload_from", [None, "smem", "gmem"])
def test_reload_from_is_the_kernels_choice(reload_from):
    check_norm("RMSNorm", 5, 8192, BF16, BF16, reload_from=reload_from)


@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("cluster_n", [2, 4, 8, MAX_CLUSTER])
@pytest.mark.sampled(when=lambda name, cluster_n: (name, cluster_n) in (("RMSNorm", 2), ("LayerNorm", 8)))
def test_clusters_asked_for(name, cluster_n):
    """Also where the row is too short for that number of blocks: the base class cuts the cluster down."""
    for N in (512, 2048, 16384, 20000, 131072):
        check_norm(name, 9, N, BF16, FP32, cluster_n=cluster_n)


@pytest.mark.parametrize("op, reduce", [("add", torch.sum), ("max", torch.amax), ("min", torch.amin)])
@pytest.mark.parametrize("N", [1, 5, 32, 100, 1000, 4096, 40000, 131072])
@pytest.mark.sampled(each_value=True)
def test_row_reduce(op, reduce, N):
    x = torch.randn(11, N, device="cuda")
    out = torch.full((11,), float("nan"), device="cuda")
    hooked = torch.zeros(11, device="cuda")
    reduction_kernels.RowReduce.launch(x, out, hooked, op=op)
    truth = reduce(x.double(), -1)
    if op == "add":
        assert_2x(out, truth, reduce(x, -1), ulps=4)
    else:
        assert torch.equal(out, truth.float())
    assert (hooked == 1).all(), "the hook ran once in every block"


@pytest.mark.parametrize("op", ["add", "max", "min"])
@pytest.mark.parametrize("N", [5, 1000, 40000])
def test_row_reduce_brings_nan_and_infinity(op, N):
    x = torch.randn(4, N, device="cuda")
    x[1, N // 2], x[2, N - 1], x[3, 0] = float("nan"), float("inf"), float("-inf")
    out, hooked = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda")
    reduction_kernels.RowReduce.launch(x, out, hooked, op=op)
    truth = {"add": torch.sum, "max": torch.amax, "min": torch.amin}[op](x, -1)
    assert torch.isnan(out[1]) and torch.isfinite(out[0])
    assert torch.equal(out[2:], truth[2:])


def test_a_subclass_is_launched_on_rows_with_a_stride():
    x = torch.randn(6, 1024, device="cuda")[:, 4:1004]
    out = torch.full((6, 1000), float("nan"), device="cuda")
    w = torch.randn(1000, device="cuda")
    contract_kernels.RMSNorm.launch(x, w, out, None, 1e-5)
    assert_2x(out, norm("RMSNorm", x.double(), w.double())[0], norm("RMSNorm", x, w)[0], ulps=4)
    contract_kernels.RMSNorm.launch(x[:0], w, out[:0], None, 1e-5)  # no rows: nothing to launch


def test_rows_that_the_kernels_accesses_cannot_take():
    """A kernel of 16-byte accesses refuses them; one that says it has narrow ones reads them."""
    wide = torch.randn(6, 1021, device="cuda")
    x = wide[:, 3:1003]
    with pytest.raises(ValueError, match="RMSNorm: argument 0: .* multiples of 16 bytes"):
        contract_kernels.RMSNorm.launch(x, torch.ones(1000, device="cuda"), torch.empty_like(x), None, 1e-5)
    out, hooked = torch.full((6,), float("nan"), device="cuda"), torch.zeros(6, device="cuda")
    reduction_kernels.RowReduceAnywhere.launch(x, out, hooked, op="max")
    assert torch.equal(out, x.amax(-1))


def test_rsqrt():
    x = torch.cat([torch.tensor([0.0, 1e-42, 1e-38, 1.0, 4.0, 3e38, float("inf"), float("nan"), -1.0], device="cuda"),
                   torch.logspace(-30, 30, 99991, device="cuda")])
    out = torch.zeros_like(x)
    reduction_kernels.Rsqrt.launch(x[:, None], out[:, None])
    truth = torch.rsqrt(x.double())
    assert torch.equal(torch.isnan(out), torch.isnan(truth)) and out[0] == float("inf") and out[6] == 0
    fine = torch.isfinite(truth) & (truth > 0)
    assert ((out.double() - truth).abs() / unit_of(truth))[fine].max() < 0.51


def unit_of(x):
    """A float32's last place at x."""
    return torch.exp2(torch.floor(torch.log2(x)) - 23)


@pytest.mark.parametrize("bad, says", [
    (lambda x: (x[0],), r"\(M, N\)"), (lambda x: (x, x.t().contiguous()), "argument 1: got shape"),
    (lambda x: (x.t(),), "strides"),
    (lambda x: (x.cpu(), torch.ones(8), torch.empty(3, 8), None, 1e-6), "argument 0: is on cpu, .*CUDA")])
def test_launch_names_what_it_cannot_take(bad, says):
    with pytest.raises(ValueError, match=says):
        contract_kernels.RMSNorm.launch(*bad(torch.zeros(3, 8, device="cuda")))
