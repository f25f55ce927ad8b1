"""This computer or another one as data: probed, diagnosed, or read from a profile."""
