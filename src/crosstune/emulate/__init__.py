"""Emulate a run for another device on this CPU: find the operators and dtypes that it does not support."""
