"""The guides' import path: `from mps_fsdp_wrapper import MPSFSDPWrapper`."""

from crosstune.compat.mps_fsdp import MPSFSDPWrapper

__all__ = ["MPSFSDPWrapper"]
