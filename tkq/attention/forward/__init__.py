"""Flash attention's forward kernels: spec, plan, config, producer and consumer."""
