"""Resolve the requested options and the facts into a plan."""
