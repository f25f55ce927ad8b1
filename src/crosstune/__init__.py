"""Train language models on whatever machine is there, and move the run to another."""

__version__ = "0.1.0"
