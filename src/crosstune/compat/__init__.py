"""The original interfaces (BackendManager, quantization adapters, MPSFSDPWrapper), built on this package."""
