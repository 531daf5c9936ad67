"""The delta rule: `tkq.gated_delta_rule`, its gradients, and what its options make of its inputs."""
