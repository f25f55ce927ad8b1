"""One file per quantizer, found by its name: its constants (see core.quantizers.Quantizer), `check(spec, shape)` and
`quantize(weight, spec, dtype)`. A file imports its library and torch inside its functions, so that its constants can be
read where neither is installed."""
