"""Facts and predictions for a plan: the machine, the model, memory, time, and the largest batch that fits."""
