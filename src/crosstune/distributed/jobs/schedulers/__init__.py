"""The schedulers of `crosstune launch`, one file each, found by name: what they take, what they write, how they start."""
