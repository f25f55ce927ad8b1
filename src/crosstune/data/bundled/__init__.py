"""Generated datasets, found by name."""
