"""Divide a model across processes: connect them, shard with FSDP2, or reduce the gradients of replicas."""
