"""Checkpoints on disk: written atomically, verified when read, rotated, packed into archives."""
