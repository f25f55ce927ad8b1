"""Generate answers: rows with caches, sampling, and continuous batching."""
