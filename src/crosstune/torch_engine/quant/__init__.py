"""One file per quantizer, found by its name: `LIBRARY`, `BITS`, `check(spec, shape)`, `quantize(weight, spec, dtype)`."""
