"""Kernels under pressure (`tkq.testing.pressure`): delays where roles wait for each other, stages that are spoilt
before each load, stores that take long. A program of its own, as the setting is of a process, and a faulty kernel may
hang.

    python -m tests.helpers.sanitizer.pressed reads gemm

Each case runs a small problem several times, also with fewer blocks than the device has processors, so that each block
has several tasks. Results are judged as in the family's own tests, exactly where sums are exact, and where the order of
all sums is fixed the bits have to be those of the first run.
"""
import dataclasses
import math
import sys

import torch

from tests.helpers.sanitizer import pressed_attention as attention
from tests.helpers.sanitizer import pressed_delta as delta_rule
from tests.helpers.sanitizer import pressed_fft as fft
from tests.helpers.sanitizer import pressed_hedgehog as hedgehog
from tests.helpers.sanitizer.repeated import BF16, REPEATS, num_sms, same_bits
from tkq.testing import assert_2x, pressure

PLACES = {"start": 3000, "producer": 400, "consumer": 400, "wait": 400, "arrive": 400, "barrier": 300, "cluster": 1500,
          "store": 300}
# What is late: all roles now and then; loads, so that none may read before the data are there; reads, so that none may
# write before the data were read, nor give the stage back; stores, so that none may be signalled before it has left;
# the first part of a sum, so that no other may be added before it is there; one role of a block alone;
# one warpgroup behind the block's barriers, so that no other may count for it; some blocks of a cluster, so that none
# may send to what they have not set up.
KINDS = {"naps": dict(naps=PLACES), "loads": dict(naps={"load": 6000, "start": 3000}),
         "reads": dict(naps={"consumer": 4000, "arrive": 4000}, poison=True),
         "stores": dict(naps={"store": 6000}, late_stores=True, late_additions=True),
         "firsts": dict(naps={"leave": 8000}, late_stores=True),
         "roles": dict(naps=dict.fromkeys(("producer", "consumer", "wait", "arrive", "load"), 4000), poison=True,
                       one_group=True),
         "barriers": dict(naps={"barrier": 6000}, one_group=True),
         "starts": dict(naps={"start": 30000})}


# ---- products ------------------------------------------------------------------------------------------

def gemm(config=None, size=(300, 600, 1000), blocks=3, b_major="n"):
    from tests.gpu.gemm.test_gemm import check_run, operands
    from tkq.gemm.dense import ops
    from tkq.gemm.dense.config import Config

    (a, b), config = operands(size, "k", b_major), config or Config(cluster=1)
    check_run(a, b, config, blocks=blocks)
    c, want = torch.empty(size[:2], device="cuda", dtype=a.dtype), (a.double() @ b.double()).to(a.dtype)
    for _ in range(2 * REPEATS):
        ops.run(a, b, c.fill_(math.nan), config, blocks)
        assert torch.equal(c, want), "other numbers in another run"


def gemm_long():
    gemm(size=(256, 512, 8192), blocks=2, b_major="k")


def gemm_cluster():
    from tkq.gemm.dense.config import Config

    gemm(Config(overlap_epilogue=1), blocks=4)


def gemm_not_held():
    from tkq.gemm.dense.config import Config

    gemm(Config(cluster=1, hold_in_registers=False))


def gemm_wave_sync():
    from tkq.gemm.dense.config import Config

    gemm(Config(overlap_epilogue=1, wave_sync=16), (700, 1032, 512), 4, "k")


def gemm_small_m():
    from tests.gpu.gemm.test_gemm import operands
    from tests.gpu.gemm.test_gemm_epilogue import between_poison, exact
    from tkq.gemm.dense import small_m_plan
    from tkq.gemm.dense.small_m_config import SmallMConfig
    from tkq.gemm.dense.spec import GemmSpec

    a, b = operands((61, 500, 4096), "k", "k")
    want = exact(a, b)
    config = small_m_plan.fit_to_spec(SmallMConfig(64, 128, 2), GemmSpec())
    for _ in range(REPEATS):
        assert torch.equal(between_poison(a, b, config), want)


def fp8(kind="row", which="FAST", **options):
    from tests.gpu.gemm import test_fp8_gemm as cases

    config = dataclasses.replace(getattr(cases, which)[0], cluster=1)
    for _ in range(4):
        cases.check_exact(kind, (300, 528, 1168), config, blocks=3, **options)


def fp8_not_overlapped():
    """A product in flight when the stage before is given back; more steps of K than stages."""
    from tests.gpu.gemm import test_fp8_gemm as cases

    for _ in range(4):
        cases.check_exact("row", (300, 272, 1168), cases.FAST[2], blocks=3)


def fp8_promoted():
    fp8("row", "PROMOTED", promote=True)


def fp8_blocks():
    fp8("1x128_128x128", "BLOCKS", promote=True)


def fp8_small_m():
    from tests.gpu.gemm.test_fp8_small_m import take
    from tkq.gemm.fp8.small_m_config import SmallMFp8Config

    for _ in range(REPEATS):
        take("row", (61, 136, 2064), SmallMFp8Config(64, 64, 2))


def fp8_small_m_blocks():
    """Whose scales come step by step."""
    from tests.gpu.gemm.test_fp8_small_m import take
    from tkq.gemm.fp8.small_m_config import SmallMFp8Config

    for _ in range(REPEATS):
        take("1x128_128x128", (61, 136, 2064), SmallMFp8Config(64, 64, 2))


def grouped(sizes=None, n=776, k=272, blocks=6):
    from tests.gpu.gemm import test_grouped as cases

    config = dataclasses.replace(cases.FAST[0], cluster=1)
    for _ in range(4):
        cases.check("bf16", sizes or cases.SIZES["skewed"], n, k, config, behind=0, blocks=blocks)


def grouped_long():
    """Groups whose rows are the first consumer's alone, of many more steps than stages: the second, which only lets
    stages go, would be rounds ahead."""
    grouped([40, 1, 130, 64, 7], 264, 4096, 2)


def linear():
    """More chunks than stages, one and two warpgroups of the state; forward and backward."""
    from tests.gpu.linear_attention import test_linear_op as cases

    given = cases.with_states(cases.make(2, 460, 2, 4, 64, 128, "token"))
    cases.check(*given)
    gradients = torch.randn_like(given[2]), torch.randn_like(given[4])
    same_bits(lambda: cases.results(cases.ours, given, gradients))


def linear_pairs():
    """Two heads a block, whose gates have warps of their own; one, whose scores two warpgroups make in ping-pong."""
    from tests.gpu.linear_attention import test_heads as cases
    given = cases.forward(cases.make_ssd(2, 460, H=12, G=2, P=64, N=128, without=(), D_dims=2), cases.F32)
    cases.check(given, 1.0)
    same_bits(lambda: [x for heads in (1, 2) for x in cases.launch(given._replace(heads=heads), 1.0)[:2]])


def delta():
    """The delta rule likewise: corrected values and their gradients beside float64, the bits of all."""
    from tests.gpu.linear_attention import test_delta_backward as cases
    from tests.gpu.linear_attention import test_delta_launches as launches

    given = q, k, v, g, beta, initial = cases.with_state(cases.with_beta(cases.make(2, 460, 2, 4, 64, 128, "token")))
    for reverse in (False, True):
        launches.check(launches.of_gradients(launches.Given(q, k, v, g, beta, initial, torch.float32), reverse))
    gradients = torch.randn_like(v), torch.randn_like(initial)
    same_bits(lambda: cases.gradients(given, *gradients))


def delta_wide():
    from tests.gpu.linear_attention.test_wide import delta_rule  # keys of 256 columns
    same_bits(lambda: delta_rule(460, "random"))


def channels():
    """Gates for each column: passes of more chunks than stages beside float64, and the bits of what they give. The
    smallest kernels that have all waits: 32 columns of keys; two warpgroups of the state where there may be two."""
    channel_passes(("o", 32, 128), ("dv", 32, 128), ("dq", 32, 32), ("dk", 32, 32))


def channels_delta():
    """The delta rule's likewise."""
    channel_passes(*((name, 32, 32) for name in ("delta", "updates", "du", "dq_and_w", "dk_of_both")))


def channel_passes(*passes):
    from tests.gpu.linear_attention import test_channels as cases

    for name, K, V in passes:
        for decay in (0.1, 20.0) if name.startswith(("dq", "dk")) else (0.1,):  # chunks at once, and by levels
            given = cases.given_of(name, *cases.make(2, 460, 2, 4, K, V, decay=decay), states=True)
            same_bits(*(lambda of=of: [x for x in of(given, 0.3) if x is not None]  # noqa: B023
                        for of in (cases.check, cases.launch)))


def ssd():
    """Mamba-2 likewise, with a gate of its outputs; sums behind each token over several tiles of a segment."""
    from tests.gpu.linear_attention import test_ssd_backward as backward
    from tests.gpu.linear_attention import test_ssd_forward as cases
    from tests.gpu.linear_attention import test_suffix_sums as sums

    given = cases.make(2, 460, without=())
    cases.check(given)
    gradients = backward.incoming(given)
    same_bits(lambda: backward.gradients(given, *gradients))
    x, less = sums.make(2, 1, 40000, 2)
    same_bits(lambda: [sums.check(x, less)])


def based():
    """Based likewise: more chunks than stages."""
    from tests.gpu.linear_attention import test_based as cases
    from tests.gpu.linear_attention import test_based_backward as backward

    given = cases.make(2, 460, 2, 4, 64)
    cases.check(*given)
    do = torch.randn_like(given[2])
    same_bits(lambda: backward.gradients(given, do))


def packed_states():
    """Sequences of several chunks one behind the other: linear attention with gradients, the delta rule's launches."""
    from tests.gpu.linear_attention import test_packed as cases

    cu = cases.cu_of((0, 270, 271, 700, 890))
    q, k, v, g, beta, initial = cases.tensors_of("gated_delta_rule", S=900, N=4)
    for reverse in (False, True):
        cases.check_launch(cases.of_gradients(cases.Given(q, k, v, g, beta, initial, torch.float32, cu=cu), reverse))
    given, gradients = (q, k, v, g, initial), (torch.randn_like(v), torch.randn_like(initial))
    same_bits(lambda: cases.with_gradients("linear_attn", given, cu, gradients))


def steps():
    """Several tokens of sequences whose states are in a pool."""
    from tests.helpers import linear_steps as cases

    q, k, v, g = cases.make(70, 3, 2, 4, 128, 64)
    beta, pool, rows = cases.beta_of(v), cases.pool_of(80, 4, 128, 64), cases.rows_of(70, 80)

    def run():
        own = pool.clone()
        return [cases.check(q, k, v, g, own, beta, None, rows), own]

    same_bits(run)


def scan():
    """A state that goes from warp to warp, some rounds of them."""
    from tests.helpers.recurrence import check, make

    for time in (False, True):
        given = make(2, 1000, 40, time=time)
        same_bits(lambda: [*(of := check(*given))[:2], *of[2]])  # noqa: B023


# ---- rows ----------------------------------------------------------------------------------------------


def norm_backward(N=1024):
    from tests.helpers.norms.backward import check, make

    num_sms(4)
    given = make(600, N)
    same_bits(lambda: [x for x in check("rmsnorm", *given) if x is not None])


def norm_backward_warps():
    """Several warps to a row."""
    norm_backward(4096)


def norm_backward_cluster():
    from tests.helpers.norms.backward import check, make

    given = make(300, 131072)
    same_bits(lambda: [x for x in check("layernorm", *given) if x is not None], repeats=2)


def rows_held():
    """One block for each tile: several rows, one row, and a cluster to a row."""
    from tests.gpu.rows import test_rows_held as cases

    for size in ((4096, 1, 16, 64), (4096, 1, 4, 32), (4096, 2, 8, 32), (40000, 4, 8, 64)):
        x = cases.randn(1100, size[0])
        truth, peer = ((torch.softmax(x, -1) * x).sum(-1) for x in (x.double(), x.float()))

        def judged():
            mean = cases.empty(len(x))  # noqa: B023
            cases.run(cases.SoftmaxMean, size, x=x, mean=mean)  # noqa: B023
            assert_2x(mean, truth, peer, ulps=16, bias_ulps=8)  # noqa: B023
            return [mean]

        same_bits(judged)
        cases.test_three_exchanges_and_a_vector(size)


def norm_quantised():
    from tests.gpu.norms import test_norm_quant_persistent as cases
    from tkq.norms import fp8_persistent_plan

    p = fp8_persistent_plan.variants(cases.spec_of("layernorm", 65536, "row"))[0]
    x, extra = cases.make((61, 65536), "bf16", **cases.HEAVY)

    def run():
        found = cases.run("layernorm", p, x, extra, "row")
        cases.check_result("layernorm", x, extra, "row", found, "")
        return found

    same_bits(run, repeats=2)


def norm_cluster():
    from tests.gpu.norms.test_norms import check, make

    x, weight, bias = make((40, 262144), "bf16", "bf16", "bf16")
    for kind in ("rmsnorm", "layernorm"):
        same_bits(lambda: [check(kind, x, weight, bias)], repeats=2)  # noqa: B023


def softmax():
    from tests.gpu.losses import test_softmax as cases

    x = cases.make((40, 262144), "bf16")
    for _ in range(3):
        cases.check(x)


def cross_entropy():
    from tests.helpers.losses.cases import check, check_both, make

    given = make((40, 131072), "bf16", 2.0)
    same_bits(lambda: check(*given, label_smoothing=0.1), repeats=2)
    for _ in range(3):
        check_both(*given)


def rope():
    from tests.gpu.pointwise.test_rope import check, make, tables

    check(make((2, 37, 5, 128)), *tables(128), make((2, 37, 3, 128), seed=1))


def gated():
    from tests.gpu.pointwise.test_gated import check_forward, make

    check_forward("swiglu", *make((130, 1000), "bf16")[:2])


def quantize_ticketed():
    """More tiles than blocks keep."""
    num_sms(8)
    quantize()


def quantize(shape=(300, 4096), repeats=4):
    """Of smaller and smaller numbers: what was largest before is larger."""
    from tests.gpu.quantize.test_quantize import run

    for i in range(repeats):
        x = (torch.randn(shape, device="cuda") * 2 ** (7 - i % 8)).to(BF16)
        for granularity, transpose in (("tensor", True), ("row", True)):
            run(x, granularity, transpose=transpose)


def quantize_few():
    """Each column's largest is found by two blocks: one warp of either may be the last to add what it found."""
    quantize((256, 128), 50)


def quantize_ticketed_few():
    """A tile, found by one block and written by another."""
    num_sms(0)
    quantize((128, 128), 50)


CASES = {f.__name__: f for f in (
    *attention.CASES, *fft.CASES, *hedgehog.CASES, *delta_rule.CASES, gemm, gemm_long, gemm_cluster, gemm_not_held,
    gemm_wave_sync, gemm_small_m, fp8, fp8_not_overlapped, fp8_promoted, fp8_blocks, fp8_small_m, fp8_small_m_blocks,
    grouped, grouped_long, linear, linear_pairs, delta, delta_wide, channels, channels_delta, packed_states, ssd, based,
    steps, scan, norm_backward, norm_backward_warps, norm_backward_cluster, norm_cluster, norm_quantised, rows_held,
    softmax, cross_entropy, quantize, quantize_few, quantize_ticketed, quantize_ticketed_few, rope, gated)}


def main(kind, case):
    torch.eye(2, device="cuda").mm(torch.eye(2, device="cuda"))  # so that cuBLAS is there before a kernel's fault
    pressure(**KINDS[kind])
    CASES[case]()
    torch.cuda.synchronize()
    print("1 passed")


if __name__ == "__main__":
    main(*sys.argv[1:])
