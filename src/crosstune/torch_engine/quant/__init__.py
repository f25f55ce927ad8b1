"""Quantizers of the torch engine, one module each, found by name. A module defines

- its constants (see core.quantizers.Quantizer); it imports torch and the library only inside functions;
- `check(spec, shape)`, which raises a UserError if it cannot quantize this shape;
- `quantize(weight, spec, dtype)`, which returns tensors by name (the packed bits as `packed`) and JSON facts;
- `dequantize(tensors, facts, dtype)`, which returns the dense matrix without copies or device synchronization;
- `restore(tensors, facts)`, which returns both from a file, including files of older versions.
"""
