"""Merge, export, convert and verify trained models, and open them for generation."""
