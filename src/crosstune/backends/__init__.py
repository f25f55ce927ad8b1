"""The backends, one file each, found by name: what a backend is called, its device, its settings."""
