"""The schedulers of `crosstune launch`, one file each, found by name: options, checks, text and start."""
