"""Trackers (wandb, weave, trackio, tensorboard): observers that log a run's metrics, each in its own thread."""
