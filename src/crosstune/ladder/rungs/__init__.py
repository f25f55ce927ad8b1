"""The rungs of the ladder: one file each, found by its name."""
