"""The training loop, the only one: steps, prefetching, checkpoints, stopping, for every recipe and engine."""
