"""Tasks of the torch engine, one file each: a model, the arrays of a batch, a loss."""
