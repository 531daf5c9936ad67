"""Random calls of every public operation, usual and odd ones, judged against plain PyTorch in float64.

    python -m tests.fuzz [--device cpu|cuda] [--calls 2000] [--seed 0] [--seconds 60] [--jobs 1] [--only rope,gemm]

A call is right where its result (and its gradients) are the oracle's, or where it is refused by a TypeError, a
ValueError or a NotImplementedError that names an argument. All else is listed, once for each kind.

| module | has |
| --- | --- |
| ``usual`` | arguments that every operation takes, at random |
| ``odd`` | what replaces one or two of them, by the argument's kind in ``tkq.runtime.arguments`` |
| ``oracles`` | what an operation means, in float64 |
| ``judge`` | is a result the oracle's? |
| ``run`` | makes a call, and says how it ended |
"""
