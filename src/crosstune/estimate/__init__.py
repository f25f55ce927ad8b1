"""Estimates of memory, time and speed, from the shape of a model and the description of a machine."""
