"""Every GEMM kernel that the tests of machine code cover, and what its machine code must show. Pure Python."""
import itertools
from dataclasses import replace

from ...runtime.compile.expectation import REGISTER_FILE, Expectation
from ...runtime.compile.recipe import Recipe, Shipped
from ..epilogue.spec import Epilogue
from . import small_m_plan
from .config import STEP, STORE_ROW_BYTES, Config, wide_residual
from .plan import PARTED, TILES, WAVE_SYNC, configure, recipe_of
from .realign_config import RealignSpec
from .small_m_config import SLOT_BYTES, WIDTHS, SmallMConfig
from .spec import BYTES, GemmSpec

EPILOGUES = {  # beside the plain one, in the largest tile and a small one
    "bias": Epilogue(bias="bf16"),
    "bias_relu": Epilogue("relu", bias="bf16"),
    "bias_silu": Epilogue("silu", bias="bf16"),
    "bias_gelu": Epilogue("gelu", bias="bf16"),
    "bias_gelu_tanh": Epilogue("gelu_tanh", bias="fp32"),
    "swiglu": Epilogue("swiglu"),
    "bias_geglu": Epilogue("geglu", bias="bf16"),
    "c": Epilogue(residual=True, residual_pairs=True),
    "all_silu": Epilogue("silu", bias="fp32", residual=True, residual_pairs=True, alpha=True, beta=True),
}
QUICK = ("bias_gelu", TILES[3]), ("swiglu", TILES[0])
# of B with contiguous K that with wave sync is quick: it has the other's code and a wait besides
QUICK_PLAIN = GemmSpec(), GemmSpec(a_major="m", store="rows"), GemmSpec(a_major="m", accumulate=True)


def expectation(spec: GemmSpec, config: Config) -> Expectation:
    """What the dense kernel's machine code must show: the wgmma of a tile's first step of K and of the loop, waited for
    once each."""
    products = STEP // 16
    n_stores = config.n // (2 if spec.epilogue.gate else 1) * BYTES[spec.out] // STORE_ROW_BYTES
    by_tma = "UTMAREDG" if spec.accumulate else "UTMASTG"
    wanted = ["UTMALDG", "USETMAXREG", by_tma if spec.store == "tma" else "STG"]
    dims = 2 + bool(spec.epilogue.gate) + ("b" in spec.batch)
    wanted += [f"UTMALDG.{dims}D.MULTICAST"] * (config.cluster > 1)
    wanted += ["REDG.E.INC", "LDG.E.STRONG.GPU"] * (config.wave_sync > 0)
    return Expectation(tensor=(2 + n_stores * config.overlap_epilogue) * products, waits_per_mma=1 / products,
                       instructions=tuple(wanted), absent=PARTED + ("STG",) * (spec.store == "tma"),
                       registers=min(255, REGISTER_FILE // (128 * (1 + config.consumers)) // 8 * 8),
                       smem=config.shared_bytes(spec) + 1024)


def small_m_expectation(spec: GemmSpec, config: SmallMConfig) -> Expectation:
    """As ``expectation``, of the small-M kernel: so few registers that two blocks fit and, but for a block that has its
    SM for itself, so little shared memory."""
    places = 2 if config.shared_bytes(spec) <= SLOT_BYTES else 1
    return Expectation(tensor=STEP // 16, waits_per_mma=0.5, instructions=("UTMALDG", "STG"),
                       registers=REGISTER_FILE // 2 // config.threads // 8 * 8, smem=2 // places * SLOT_BYTES + 1024)


def shipped() -> list[Shipped]:
    """Every tile with every order of the operands and every way out; fp16 where torch's usual layouts take it; the
    epilogues, batches; small M; the kernel for what TMA does not take, and copies into what it takes."""
    return [*_plain(), *_epilogues(), *_wave_sync(), *_small_m(), *_elements(), *_copies()]


def _wave_sync():
    """Which a plan takes for large tiles only, in clusters."""
    specs = [GemmSpec(out=out, a_major=a, b_major=b) for a, b, out in (
        ("k", "k", "bf16"), ("k", "n", "bf16"), ("m", "n", "bf16"), ("k", "k", "fp32"))]
    specs += [GemmSpec(b_major="k", store="rows"), GemmSpec("fp16", "fp16", b_major="k"),
              GemmSpec(b_major="k", epilogue=Epilogue("silu")), GemmSpec(b_major="k", epilogue=EPILOGUES["c"])]
    for spec in specs:
        config = replace(configure(TILES[0], spec), wave_sync=WAVE_SYNC)
        name = "_".join(filter(None, (spec.epilogue.activation, "c" * spec.epilogue.residual)))
        yield _dense(spec, config, name, spec == specs[0])


def _plain():
    majors = list(itertools.product("km", "kn"))
    ways_out = (("bf16", "tma"), ("fp32", "tma"), ("bf16", "rows"), ("fp32", "rows"))
    specs = [GemmSpec("bf16", out, a, b, store=store) for out, store in ways_out for a, b in majors]
    specs += [GemmSpec("fp16", out, "k", b) for out in ("fp16", "fp32") for b in "kn"]
    specs += [GemmSpec("bf16", out, "m", "n", store=way, accumulate=True)
              for out, way in (("bf16", "tma"), ("fp32", "tma"), ("bf16", "direct"))]
    specs += [GemmSpec(batch=batch, b_major=b) for batch, b in (("ab", "n"), ("ab", "k"), ("b", "n"), ("a", "k"))]
    for spec, tile in itertools.product(specs, TILES):
        quick = spec in QUICK_PLAIN and tile is TILES[0]
        yield _dense(spec, configure(tile, spec), "batch" + spec.batch if spec.batch else "", quick)


def _epilogues():
    for (name, epilogue), out, tile in itertools.product(EPILOGUES.items(), ("bf16", "fp32"), (TILES[0], TILES[3])):
        spec = GemmSpec(out=out, b_major="k", epilogue=epilogue)
        if wide_residual(spec) and tile.n == 256:
            continue
        quick = (name, tile) in QUICK and out == "bf16"
        yield _dense(spec, configure(tile, spec), name, quick)
    for name in ("bias_silu", "swiglu"):
        spec = GemmSpec(b_major="k", epilogue=EPILOGUES[name])
        yield _dense(spec, Config(overlap_epilogue=2 if name == "bias_silu" else 4, defer_activation=True),
                     f"{name}_other")
    yield _dense(GemmSpec(), Config(), "in_the_gap")


def _dense(spec: GemmSpec, config: Config, epilogue="", quick=False) -> Shipped:
    words = ["add"] * spec.accumulate + [epilogue] * bool(epilogue) + [spec.store, config.name]
    name = f"gemm_{spec.dtype}_{spec.a_major}{spec.b_major}_{spec.out}_{'_'.join(words)}"
    return Shipped(name, recipe_of(spec, config), expectation(spec, config), quick)


def _small_m():
    for b_major, m in itertools.product("kn", WIDTHS):
        spec = GemmSpec(b_major=b_major)
        yield _of_small_m(spec, small_m_plan.plan(spec, m, 8192, 8192, 132), quick=m == 16 and b_major == "k")
    spec = GemmSpec(b_major="n", epilogue=EPILOGUES["bias_geglu"])
    yield _of_small_m(spec, small_m_plan.plan(spec, 128, 8192, 8192, 132), "bias_geglu", quick=True)
    for split, rows in ((2, 64), (4, 128), (8, 64)):
        config = small_m_plan.fit_to_spec(SmallMConfig(64, rows, split), GemmSpec(b_major="k"))
        yield _of_small_m(GemmSpec(b_major="k"), config, "other")
    for name in ("bias", "bias_gelu", "all_silu", "swiglu", "bias_geglu"):
        spec = GemmSpec(out="fp32", b_major="k", epilogue=EPILOGUES[name])
        yield _of_small_m(spec, small_m_plan.plan(spec, 16, 8192, 8192, 132), name)


def _of_small_m(spec, config, what="", quick=False):
    name = "_".join(filter(None, (f"gemm_{spec.dtype}_k{spec.b_major}_{spec.out}", what, config.name)))
    return Shipped(name, small_m_plan.recipe(spec, config), small_m_expectation(spec, config), quick)


def _elements():
    tiles = (64 + 128) * 64 * 2  # bytes of A's and B's
    wanted = Expectation(tensor=4, waits_per_mma=0.25, instructions=("LDG", "STG"), absent=("UTMALDG",),
                         smem=tiles + 1024)
    types = [("bf16", "bf16", a, b) for a, b in itertools.product("km", "kn")]
    types += [("bf16", "fp32", "k", "n"), ("fp16", "fp16", "k", "n"), ("fp16", "fp32", "m", "k")]
    cases = [(f"{dtype}_{a}{b}_{out}", GemmSpec(dtype, out, a, b, "direct", "direct"))
             for dtype, out, a, b in types]
    for name in ("swiglu_interleaved", "silu"):
        epilogue = Epilogue(name, bias="bf16", residual=name == "silu")
        cases.append((f"bf16_kn_{name}", GemmSpec(load="direct", store="direct", epilogue=epilogue, batch="ab")))
    for name, spec in cases:
        four_blocks = REGISTER_FILE // 4 // 128  # run on an SM, but where C is added
        registers = 255 if spec.epilogue.residual else four_blocks
        yield Shipped(f"gemm_{name}_elements", Recipe("tkq.gemm.dense.unaligned:UnalignedGemm", (spec,)),
                      replace(wanted, registers=registers),
                      name == "bf16_kn_bf16")


def _copies():
    wanted = Expectation(instructions=("LDG.E.128", "STG.E.128"), registers=REGISTER_FILE // 1536 // 8 * 8)
    for dtype, both in itertools.product(("bf16", "fp16"), (False, True)):
        yield Shipped(f"gemm_copy_{dtype}{'_both' * both}",
                      Recipe("tkq.gemm.dense.realign:Realign", (RealignSpec(dtype, both),)), wanted,
                      dtype == "bf16" and both)
