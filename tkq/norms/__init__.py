"""Normalisations over the last dimension: RMSNorm and LayerNorm."""
