"""Geometry and launch of ReductionBase."""
