"""Check and describe a data set before training."""
