"""Fixtures of several files here."""

from opened_rewards import open_, seen

__all__ = ["open_", "seen"]
