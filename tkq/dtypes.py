"""Bits of element types, and the largest numbers of float8."""

WIDTH = {"bf16": 16, "fp16": 16, "fp32": 32}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}  # of the types that are scaled
