"""The import of the guides: `from mps_fsdp_wrapper import MPSFSDPWrapper`."""

from crosstune.compat.mps_fsdp import MPSFSDPWrapper

__all__ = ["MPSFSDPWrapper"]
