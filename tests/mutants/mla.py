"""Faults in decoding of multi-head latent attention."""
from .mutant import family

TESTS = "tests/gpu/attention/test_mla.py::"
PAGES, EDGES, SHARED, FIXED, LIES = ((f"{TESTS}{name}",) for name in (
    "test_pages", "test_queries_that_see_other_keys", "test_work_that_blocks_share",
    "test_fixed_splits_do_not_depend_on_the_batch", "test_what_lies_gives_nan"))
MERGED = "tests/cpu/attention/test_mla_cpu.py::test_tasks_that_are_merged",
