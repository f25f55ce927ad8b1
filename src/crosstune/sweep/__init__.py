"""Sweep options: run a trial for each choice of values, stop poor ones early, and find the best."""
