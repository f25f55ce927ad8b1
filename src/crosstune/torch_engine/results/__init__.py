"""Results of the torch engine: export, merge, convert, verify."""
