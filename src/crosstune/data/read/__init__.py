"""Read rows from files, the hub and memory, and turn them into conversations."""
