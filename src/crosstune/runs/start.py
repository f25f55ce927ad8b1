"""Describe the checkpoint that a run continues from, and how the run differs from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from crosstune.checkpoint.read import Checkpoint
from crosstune.core.measured import Measured
from crosstune.runs import same_training


@dataclass(frozen=True, kw_only=True)
class Start:
    """The checkpoint a resumed run starts from, and how the run differs from it."""

    checkpoint: Checkpoint
    differences: Sequence[same_training.Difference]
    """Allowed by --allow_mismatch."""
    adapted: Sequence[same_training.Difference]
    """Expected on another backend."""
    changes: Sequence[same_training.Difference]
    measured: Measured | None
    """Loss of the next batches, measured on the machine of the checkpoint."""

    @property
    def step(self) -> int:
        return self.checkpoint.step

    def facts(self) -> dict[str, Any]:
        return {
            "checkpoint": str(self.checkpoint.folder),
            "step": self.step,
            "backend": self.checkpoint.manifest["backend"],
            "adapted": [difference.sentence() for difference in self.adapted],
            "allowed_differences": [difference.sentence() for difference in self.differences],
            "changed_options": [change.sentence() for change in self.changes],
        }
