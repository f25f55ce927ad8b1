"""Faults on purpose, shared by the tests of this folder and by benchmarks/faults.py."""
