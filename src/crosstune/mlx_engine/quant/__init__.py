"""Quantizers of the MLX engine, one module each, found by name. Constants as in core.quantizers.Quantizer."""
