"""The original import path: `from backend_manager import BackendManager, Backend`."""

from crosstune.compat.backend_manager import (
    CAPABILITIES,
    Backend,
    BackendCapabilities,
    BackendManager,
    detect_backend,
    get_backend_manager,
    get_device,
)

__all__ = [
    "CAPABILITIES",
    "Backend",
    "BackendCapabilities",
    "BackendManager",
    "detect_backend",
    "get_backend_manager",
    "get_device",
]
