"""Roles and pipes of tkq's kernels."""
