"""What kernels of long convolutions are compiled for: one part for the operands of all of them."""
from tkq.runtime.compile import fake


class Operands:
    """Fake tensors (B, H, L) of one call, of a spec's dtype: of any sizes, which all share, and any strides, but of
    neighbouring tokens."""

    def __init__(self, spec):
        self.spec = spec
        self.B, self.H, self.L = fake.sym(), fake.sym(), fake.sym(divisibility=spec.vector)

    def one(self):
        spec = self.spec
        steps = [fake.sym64(divisibility=spec.vector) for _ in range(2)]
        return fake.tensor(spec.dtype, (self.B, self.H, self.L), (*steps, 1), align=2 * spec.vector)

    def gates(self):
        """[pre, post], None where there is none."""
        return [self.one() if there else None for there in (self.spec.pre, self.spec.post)]
