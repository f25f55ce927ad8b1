"""Trackers (wandb, weave, trackio, tensorboard): observers that pass a run's metrics on, each in a process of its own."""
