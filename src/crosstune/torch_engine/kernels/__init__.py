"""The fast path of decoder layers with adapters: fused operations and hand-written backward passes."""
