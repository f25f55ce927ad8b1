"""Tokenize rendered text, and keep the tokens in memory or on disk."""
