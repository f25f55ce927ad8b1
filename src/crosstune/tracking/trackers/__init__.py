"""The trackers of --log_to, one file each, found by name: how each one starts a run, takes values and finishes."""
