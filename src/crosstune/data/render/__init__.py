"""Render conversations with a chat template, and find the supervised spans."""
