"""The original guides' interfaces (BackendManager, quantization adapters, MPSFSDPWrapper), built on this package."""
