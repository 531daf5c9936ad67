"""Attention over a prefix that all sequences of a batch share: `tkq.cascade_attention` and `tkq.plan_cascade`."""
