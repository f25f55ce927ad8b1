"""Load a model: read its files, quantize, add blocks and adapters, compile."""
