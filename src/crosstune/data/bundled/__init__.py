"""Data sets that are generated here, found by name."""
