"""Cross entropy, of logits and of a linear layer's output that is never whole in memory; forward and backward."""
