"""Gather facts for a plan, predict memory and time, and search for the largest batch that fits."""
