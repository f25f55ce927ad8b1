"""The original import path: `from mps_fsdp_wrapper import MPSFSDPWrapper`."""

from crosstune.compat.mps_fsdp import (
    MPSFSDPConfig,
    MPSFSDPWrapper,
    check_mps_fsdp_compatibility,
    create_mps_fsdp_wrapper,
    meet_on_this_machine,
    wrap_model_for_mps,
)

# Programs of the original interface set two variables for each process; torch's init_process_group needs four.
meet_on_this_machine()

__all__ = [
    "MPSFSDPConfig",
    "MPSFSDPWrapper",
    "check_mps_fsdp_compatibility",
    "create_mps_fsdp_wrapper",
    "wrap_model_for_mps",
]
