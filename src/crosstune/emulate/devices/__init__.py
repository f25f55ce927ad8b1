"""One file per backend that can be emulated on the CPU, found by its name: what its device takes and what it refuses."""
