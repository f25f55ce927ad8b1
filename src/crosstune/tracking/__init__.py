"""Trackers, such as wandb: observers that log a run's metrics, each in its own thread."""
