"""Compute the rows of a step from the seed and the step number, packed or not, for any number of devices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from crosstune.config.schema import Config
from crosstune.data.batches.epoch_order import Mixture, epoch_order
from crosstune.data.batches.packing import PackedOrder


@dataclass(frozen=True, kw_only=True)
class RowOrder:
    """The order of examples. A step depends only on its number, so there is no iterator state to save."""

    num_examples: int
    seed: int
    rows_per_step: int
    num_epochs: float
    max_steps: int
    """-1 for no limit."""
    packed: PackedOrder | None = None
    """Set when rows contain multiple examples."""
    mixture: Mixture | None = None
    """Set when sources are weighted."""

    @classmethod
    def from_config(
        cls,
        config: Config,
        *,
        num_examples: int,
        packed: PackedOrder | None = None,
        mixture: Mixture | None = None,
    ) -> RowOrder:
        return cls(
            num_examples=num_examples,
            seed=config.seed,
            rows_per_step=rows_per_step(config),
            num_epochs=config.num_epochs,
            max_steps=config.max_steps,
            packed=packed,
            mixture=mixture,
        )

    def num_steps(self) -> int:
        """Return the number of steps for all epochs, at most max_steps; the last step may have fewer rows."""
        by_epochs = math.ceil(self._num_rows() / self.rows_per_step)
        if self.max_steps == -1:
            return by_epochs
        return self.max_steps if self.num_epochs == 0 else min(self.max_steps, by_epochs)

    def rows(self, step: int) -> list[list[int]]:
        """Return the example indices of each row of step `step`, counted from 0; one per row unless rows are packed."""
        first = step * self.rows_per_step
        last = min(first + self.rows_per_step, self._num_rows() or first + self.rows_per_step)
        if self.packed is not None:
            return [row.tolist() for row in self.packed.rows(first, last)]
        indices: list[int] = []
        while first < last:
            epoch, place = divmod(first, self.num_examples)
            order = epoch_order(self.num_examples, seed=self.seed, epoch=epoch, mixture=self.mixture)
            indices += order[place : place + last - first].tolist()
            first = min(last, (epoch + 1) * self.num_examples)
        return [[index] for index in indices]

    def position(self, step: int) -> dict[str, float]:
        """Return the position in the data after `step` steps. Rows are packed per epoch, so none is partly filled."""
        done = min(step * self.rows_per_step, self._num_rows() or step * self.rows_per_step)
        epoch, row = divmod(done, self.num_examples) if self.packed is None else self.packed.place(done)
        size = self.num_examples if self.packed is None or not row else len(self.packed.epoch(epoch))
        return {"rows_done": done, "epoch": epoch, "row_in_epoch": row, "epochs_done": epoch + row / size}

    def identity(self) -> Mapping[str, Any]:
        """Return everything, apart from the examples, that determines the examples of a step."""
        found = {
            "seed": self.seed,
            "rows_per_step": self.rows_per_step,
            "packing": self.packed.capacity if self.packed is not None else None,
        }
        return found | ({"mixture": self.mixture.identity()} if self.mixture is not None else {})

    def _num_rows(self) -> int:
        """Return the number of rows of all epochs, the last possibly partial; 0 if only --max_steps limits them."""
        if self.packed is None:
            return math.ceil(round(self.num_examples * self.num_epochs, 6))
        most = None if self.max_steps == -1 else self.max_steps * self.rows_per_step
        return self.packed.num_rows(self.num_epochs, at_most=most)


def rows_per_evaluation(config: Config, *, at_least: int = 1) -> int:
    """Return the number of rows to evaluate at a time; `at_least` applies unless --eval_batch_size is set."""
    return config.eval_batch_size or max(at_least, config.batch_size)


def rows_per_step(config: Config) -> int:
    """Return the number of rows of an optimizer step, across all ranks."""
    return config.rows_per_step or (
        config.batch_size * config.gradient_accumulation_steps * num_at_once(config)
    )


def num_at_once(config: Config) -> int:
    """Return the number of micro-batches that the ranks compute at once; --context_parallel ranks share one."""
    return max(1, config.world_size // config.context_parallel)
