"""The engine on torch and transformers: models, adapters, optimizers and quantization."""
