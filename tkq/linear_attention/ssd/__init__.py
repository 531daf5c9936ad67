"""Mamba-2's state space dual: `tkq.mamba2_ssd` and its gradients."""
