"""What kernels of rows that are read once are compiled for."""
from ...runtime.compile import fake


def matrix(spec, rows):
    """A fake tensor of rows, (M, N) with any row stride. rows: M, of `fake.sym`."""
    unit = 1 if spec.shifted else spec.vector
    return fake.tensor(spec.x, (rows, spec.N), (fake.sym64(divisibility=unit), 1), align=unit * spec.width // 8)
