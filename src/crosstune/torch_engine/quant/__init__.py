"""The quantizers of the torch engine, one file each, found by name. A file holds

- its constants (see core.quantizers.Quantizer), readable without torch: torch and the library are imported in functions;
- `check(spec, shape)`, which raises a UserError for what it cannot quantize;
- `quantize(weight, spec, dtype)`, which returns tensors by name (the bits themselves as `packed`) and JSON facts;
- `dequantize(tensors, facts, dtype)`, which makes the dense matrix of them, without copies or waits on the device;
- `restore(tensors, facts)`, which returns both from a file, also from one that an older version wrote.
"""
