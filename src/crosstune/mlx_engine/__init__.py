"""The engine on MLX: models, adapters, optimizers and quantization, without torch."""
