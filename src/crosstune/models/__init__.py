"""Model folders without a framework: found, fetched, checked, converted from and to GGUF, adapters as files."""
