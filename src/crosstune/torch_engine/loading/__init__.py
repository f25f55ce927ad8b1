"""Load a model: read its files, quantize, add adapters, compile blocks."""
