"""One module for each emulated backend, found by name: the operators and dtypes of its device."""
