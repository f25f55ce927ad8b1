"""The recipes, one file each, found by name: a kind of training with its data, batches and evaluation."""
