"""``tkq.warmup.models``, by its public place."""
from .warmup.models import MODELS, Model

__all__ = ["MODELS", "Model"]
