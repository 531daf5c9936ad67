"""Kernels before their first call: the catalog, models, prefetching, tuning."""
