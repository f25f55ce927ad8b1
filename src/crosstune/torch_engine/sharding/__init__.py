"""Divide a model over processes from outside: FSDP2 shards, or replicas whose gradients are reduced."""
