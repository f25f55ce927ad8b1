"""Rewards of reinforcement learning: functions, checks, judges and servers, each with a weight and a name."""
