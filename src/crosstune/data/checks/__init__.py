"""Check and describe a dataset before training."""
