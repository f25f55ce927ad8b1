"""The CPU through PyTorch."""

from __future__ import annotations

from crosstune.core.backend import BackendSpec

SPEC = BackendSpec(
    name="cpu",
    title="CPU",
    engine="torch",
    device="cpu",
    overhead_bytes=450 * 2**20,
    preference=90,
    collective="gloo",
    install="It needs torch: pip install 'crosstune[torch]'",
)
