"""The guides' MPSFSDPWrapper: so far only its checkpoints, in the format of crosstune's runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from crosstune.core.errors import UserError


class MPSFSDPWrapper:
    """Saves and loads a model with its optimizer. A checkpoint is a folder with hashes and without pickles."""

    def save_checkpoint(
        self, model: Any, checkpoint_path: str | Path, optimizer: Any = None, **metadata: Any
    ) -> Path:
        from crosstune.compat.torch_parts.model_checkpoint import save_model_checkpoint

        path = Path(checkpoint_path).expanduser()
        return save_model_checkpoint(model, path, optimizer=optimizer, metadata=metadata)

    def load_checkpoint(
        self, model: Any, checkpoint_path: str | Path, optimizer: Any = None, strict: bool = True
    ) -> dict[str, Any]:
        """Return the metadata. Without `strict`, weights that only one side has are left as they are."""
        from crosstune.compat.torch_parts.model_checkpoint import load_model_checkpoint

        path = Path(checkpoint_path).expanduser()
        return load_model_checkpoint(model, path, optimizer=optimizer, strict=strict)

    def wrap_model(self, model: Any, *options: Any, **named: Any) -> Any:
        raise UserError(
            "Not built yet: sharding a model with MPSFSDPWrapper.",
            do="train on one device; save_checkpoint and load_checkpoint work on the plain model",
        )
