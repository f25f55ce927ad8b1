"""Which examples make up which step, packed or not: what every recipe over a list of examples shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from crosstune.config.schema import Config
from crosstune.data.order import rows_in_epochs, rows_of_step, steps_of_rows, total_steps
from crosstune.data.packing import PackedOrder


@dataclass(frozen=True, kw_only=True)
class RowOrder:
    """A step is a function of its number: no iterator has to be saved, and any step can be made again."""

    num_examples: int
    seed: int
    rows_per_step: int
    num_epochs: float
    max_steps: int
    """-1 for no limit."""
    packed: PackedOrder | None = None
    """Given where rows hold several examples."""

    @classmethod
    def from_config(cls, config: Config, *, num_examples: int, packed: PackedOrder | None = None) -> RowOrder:
        return cls(
            num_examples=num_examples,
            seed=config.seed,
            rows_per_step=rows_per_step(config),
            num_epochs=config.num_epochs,
            max_steps=config.max_steps,
            packed=packed,
        )

    def num_steps(self) -> int:
        if self.packed is None:
            return total_steps(
                self.num_examples,
                rows_per_step=self.rows_per_step,
                num_epochs=self.num_epochs,
                max_steps=self.max_steps,
            )
        return steps_of_rows(
            self._num_packed_rows(self.packed),
            rows_per_step=self.rows_per_step,
            num_epochs=self.num_epochs,
            max_steps=self.max_steps,
        )

    def rows(self, step: int) -> list[list[int]]:
        """Return the examples in each row of a step, counted from 0; one a row unless rows are packed."""
        first = step * self.rows_per_step
        if self.packed is not None:
            in_all = self._num_packed_rows(self.packed)
            last = min(first + self.rows_per_step, in_all or first + self.rows_per_step)
            return [row.tolist() for row in self.packed.rows(first, last)]
        by_epochs = rows_in_epochs(self.num_examples, self.num_epochs)
        indices = rows_of_step(
            step,
            num_examples=self.num_examples,
            rows_per_step=self.rows_per_step,
            num_rows_in_all=by_epochs or self.max_steps * self.rows_per_step,
            seed=self.seed,
        )
        return [[index] for index in indices]

    def position(self, step: int) -> dict[str, int]:
        """Return how far in the data a run is after `step` steps. Rows are packed an epoch at a time, from its order
        alone: no half-filled row outlives a step."""
        done = step * self.rows_per_step
        epoch, row = divmod(done, self.num_examples) if self.packed is None else self.packed.place(done)
        return {"rows_done": done, "epoch": epoch, "row_in_epoch": row}

    def identity(self) -> Mapping[str, Any]:
        """Return everything beside the examples that decides which of them make up which step."""
        return {
            "seed": self.seed,
            "rows_per_step": self.rows_per_step,
            "packing": self.packed.capacity if self.packed is not None else None,
        }

    def _num_packed_rows(self, packed: PackedOrder) -> int:
        most = None if self.max_steps == -1 else self.max_steps * self.rows_per_step
        return packed.num_rows(self.num_epochs, at_most=most)


def rows_per_step(config: Config) -> int:
    return config.batch_size * config.gradient_accumulation_steps * max(1, config.world_size)
