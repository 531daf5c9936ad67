"""Mutants: one fault each in a kernel, and the tests that must fail with it.

    python -m tests.mutants [NAME ...] [--jobs N] [--timeout SECONDS] [--list] [--no-baseline]

On a GPU. A test that cannot fail is a defect: here it is seen to fail. Each mutant is applied to a copy of the tree. Of
a fault that runs do not show, a race that takes hundreds of clocks' luck, the test reads the compiled kernel.
First the tests are run on the tree as it is: they must pass, and the kernels that they compile serve the mutants that
leave them alone. A mutant is caught by a failed test, a crash or the time limit. `tests/cpu/testing/test_mutants.py`
asserts that each line still stands where it is said to, so that the list cannot rot.
"""
