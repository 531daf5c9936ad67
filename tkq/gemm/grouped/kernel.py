"""Products of groups: one launch for all of them, whose sizes are known on the device alone."""
import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from ... import tile as tk
from ..fp8.block import Block
from ..fp8.config import Fp8Config
from ..fp8.spec import BYTES, GROUP
from .groups import Globals, Groups, deep, last_first, tiles_of
from .k_grouped import MaskedGroups
from .spec import GroupedSpec


class GroupedGemm:
    """The roles of ``Fp8Gemm``, on tiles that belong to groups. 16-bit operands, too.

      operands   ``Groups``; along K in float8 ``MaskedGroups``
      table      ``GroupTable``, in shared memory: written by warp 0 before the roles part, read by all

    Everything else is as the config says, see ``fp8.block.Block``.
    """

    def __init__(self, spec: GroupedSpec, config: Fp8Config):
        self.spec, self.config, self.tiles = spec, config.check(spec), tiles_of(spec, config)
        self.groups = (MaskedGroups if spec.masked else Groups)(spec, config, self.tiles)
        self.block = Block(spec, config, self.tiles, self.groups)

    def __str__(self):
        """Part of the kernel's name."""
        return f"tkqgemm GroupedGemm {self.block.parts}"

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, offsets: cute.Tensor, scale_a: tuple,
                 scale_b: tuple, blocks: Int32, stream: cuda.CUstream):
        """a (M, K); b (G, K, N) or, along K, (K, N); c (M, N), or (G, M, N)."""
        x, tiles, along_k, groups = self.config, self.tiles, self.groups.along_k, offsets.shape[0]
        m, k, n = a.shape[0], a.shape[1], b.shape[2 - along_k]
        across, one = (x.cluster, 1) if const_expr(x.cluster_along_n) else (1, x.cluster)
        steps = cute.ceil_div(k, GROUP)
        g = Globals(
            a=tk.gl.load(self.groups.rows(a), tiles.a, across), b=tk.gl.load(self.groups.matrices(b), tiles.b, one),
            c=tk.gl.store(last_first(c) if const_expr(along_k) else tk.ragged_store(deep(c)), tiles.c),
            offsets=offsets, scale_a=self.groups.scales_of_rows(scale_a, m, steps),
            scale_b=self.groups.scales_of_columns(scale_b, groups, n, steps), m=m, n=n, k=k, groups=groups)
        self.block.launch(self.kernel(g), blocks // x.cluster * x.cluster, stream)

    def fake_arguments(self) -> tuple:
        """What it is compiled for: a, b, c, offsets; (address, stride, stride, stride) of each operand's scales; how
        many blocks to launch."""
        scales = (Int64(1),) * 4
        tensors = float8_along_k(self.spec) if self.spec.masked else operands(self.spec)
        return *tensors, scales, scales, Int32(1)

    @cute.kernel
    def kernel(self, g: Globals):
        self.block.run(g)


def operands(spec: GroupedSpec):
    """Fake a, b, c and offsets: any sizes, and what TMA asks of strides."""
    from ...runtime.compile import fake

    M, N, K, G = fake.sym(), fake.sym(), fake.sym(), fake.sym()

    def matrix(dtype, shape, rows_contiguous=True):
        """The last two dimensions, either contiguous; any pitch of whole units of 16 bytes."""
        outer = [fake.sym64(divisibility=16 // BYTES[dtype]) for _ in shape[:-1]]
        *lead, pitch = outer
        return fake.tensor(dtype, shape, (*lead, pitch, 1) if rows_contiguous else (*lead, 1, pitch))

    offsets = fake.tensor("int32", (G,), (1,), align=4)
    if spec.along == "k":
        return (matrix(spec.a, (M, K), False), matrix(spec.b, (K, N)), matrix(spec.out, (G, M, N)), offsets)
    return (matrix(spec.a, (M, K)), matrix(spec.b, (G, K, N), spec.b_major == "n"), matrix(spec.out, (M, N)), offsets)


def float8_along_k(spec: GroupedSpec):
    """The same of ``MaskedGroups``: a (M, K), b (K, N), both K-contiguous, c (G, M, N) and offsets."""
    from ...runtime.compile import fake

    M, N, K, G = fake.sym(), fake.sym(), fake.sym(), fake.sym()
    unit = 16 // BYTES[spec.out]
    return (fake.tensor(spec.a, (M, K), (fake.sym64(divisibility=16), 1)),
            fake.tensor(spec.b, (K, N), (1, fake.sym64(divisibility=16))),
            fake.tensor(spec.out, (G, M, N), (fake.sym64(divisibility=unit), fake.sym64(divisibility=unit), 1)),
            fake.tensor("int32", (G,), (1,), align=4))
