"""The tasks that the torch engine brings along, one file each: a model, the arrays of a batch, a loss."""
