"""The trackers of --log_to, one file each, found by name."""
