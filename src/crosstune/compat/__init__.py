"""The interfaces that the original guides promise (BackendManager, QuantizationWrapper, MPSFSDPWrapper), over this package."""
