"""One module per backend that can be emulated on the CPU, found by name: what its device supports and refuses."""
