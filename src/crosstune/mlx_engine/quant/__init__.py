"""The quantizers of the MLX engine, found by their file names: constants as in core.quantizers.Quantizer."""
