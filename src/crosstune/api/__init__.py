"""The Python interface: train, plan and load, their results, and callbacks."""
