"""Manifests for tests that need one but no training."""

from __future__ import annotations

from typing import Any

from crosstune.checkpoint.manifest import Manifest


def make_manifest(step: int = 1, **fields: Any) -> Manifest:
    usual: dict[str, Any] = {"engine": "torch", "backend": "cpu", "precision": "fp32", "quantization": None}
    usual |= {"identity": {}, "schedule": {"step": step}, "data": {}, "progress": {"steps": step}}
    return Manifest(step=step, **(usual | fields))
