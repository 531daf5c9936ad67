"""The kernels of convolutions that tkq itself can choose, and what their machine code must show."""
import itertools

from tkq.convolution.launch import recipe
from tkq.convolution.plan import widest
from tkq.convolution.spec import BITS, ConvSpec, StepSpec, SumsSpec
from tkq.runtime.compile.expectation import Expectation
from tkq.runtime.compile.recipe import Shipped


def shipped() -> list:
    """Of bf16 and four taps with silu, as models have them: forward and backward of each layout, with and without a
    bias, of packed sequences and with states; by seq_idx and with normed heads; steps with a pool."""
    found = [Shipped(_name(s), recipe(s), expectation(s)) for s in _convolutions()]
    found += [Shipped(f"causal_conv1d-sums-w4{'-bias' if bias else ''}", recipe(SumsSpec(4, "bf16", bias)),
                      Expectation(instructions=("LDG.E", "FADD"), absent=("ATOM", "RED"), registers=40))
              for bias in (None, "bf16")]
    for bias, indices, columns in itertools.product((None, "bf16"), ("int32", "int64"), (3, 4)):
        spec = StepSpec("bf16", "bf16", 4, bias, True, "bf16", indices, columns)
        parts = ["causal_conv1d_step", f"w4-l{columns}", indices] + ["bias"] * bool(bias)
        found.append(Shipped("-".join(parts), recipe(spec), Expectation(
            instructions=("LDG.E.U16", "STG.E.U16"), registers=40, absent=("LDS", "BAR"))))
    return found


def _convolutions():
    for bias, gradients in itertools.product(("bf16", None), (None, "both")):
        of = dict(dtype="bf16", weight="bf16", width=4, bias=bias, silu=True, gradients=gradients)
        for layout, state, packed in (("channels", None, None), ("time", None, None), ("channels", None, "int32"),
                                      ("channels", "bf16", None), ("channels", "bf16", "int32")):
            yield ConvSpec(**of, vector=widest(8, "bf16", layout), layout=layout, state=state, packed=packed)
        for more in (dict(packed="int32", numbers=True), dict(head=128), dict(head=64)):
            yield ConvSpec(**of, vector=widest(8, "bf16", "channels"), **more)


def _name(s: ConvSpec) -> str:
    parts = ["causal_conv1d", s.dtype, f"w{s.width}", s.layout, "backward" if s.backward else "forward"]
    parts += ["bias"] * bool(s.bias) + ["state"] * bool(s.state) + ["packed"] * (bool(s.packed) and not s.numbers)
    return "-".join(parts + ["numbered"] * s.numbers + [f"heads{s.head}"] * bool(s.head))


def expectation(s: ConvSpec) -> Expectation:
    """Accesses as wide as the vector; registers for 24 warps an SM, of a backward for 16, along time for 28."""
    bits = s.vector * BITS[s.dtype]
    wanted = (f"LDG.E.{bits}", f"STG.E.{bits}") if bits >= 64 and s.gradients != "weights" else ()
    along_channels = (128 if s.backward else 80) + (40 if s.backward else 16) * bool(s.packed or s.head)
    return Expectation(instructions=wanted, absent=("CALL", "LDS", "ATOM", "RED"),
                       registers=along_channels if s.layout == "channels" else 72)
