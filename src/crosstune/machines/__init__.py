"""Descriptions of machines: probed, diagnosed, or read from a profile."""
