"""Tasks of the MLX engine, one file each: a model, the arrays of a batch, a loss."""
