"""The backends, one file each, found by name: title, device and settings."""
