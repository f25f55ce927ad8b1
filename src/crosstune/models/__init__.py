"""Find, fetch and check model folders, convert GGUF files, and read and write adapters, without a framework."""
