"""The training loop for every recipe and engine: steps, prefetching, evaluation, checkpoints, stopping, profiles."""
