"""Sweep options: run a trial for each combination of values, stop poor trials early, and find the best."""
