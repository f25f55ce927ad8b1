"""Quantizers of the torch engine, one module each, found by name. A module defines

- its constants (see `core.quantization.Quantizer`); torch and the library are imported only inside functions;
- `check(spec, shape)`: raise a UserError if this shape cannot be quantized;
- `quantize(weight, spec, dtype)`: return tensors by name (the packed bits as `packed`) and JSON facts;
- `dequantize(tensors, facts, dtype)`: return the dense matrix without copies or device synchronization;
- optionally `restore(tensors, facts)`: convert both from files in an older layout.
"""
