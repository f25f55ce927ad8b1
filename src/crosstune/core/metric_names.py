"""Check the names of a task's metrics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from crosstune.core.errors import UserError
from crosstune.core.events import StepMetrics


def check_metric_names(names: Sequence[str], *, weight_name: str) -> None:
    """Raise where a metric would replace a column of metrics.jsonl."""
    taken = {*StepMetrics.__annotations__, weight_name}
    if bad := sorted(taken.intersection(names)):
        raise UserError(
            f"A metric of the recipe's task cannot be called {bad[0]}.",
            why="metrics.jsonl has a column of that name already.",
            do="rename it in `metric_names` and in what `loss` returns",
        )


def check_known_metrics(found: Iterable[str], names: Iterable[str]) -> None:
    """Raise where a task returns a metric that it does not declare."""
    known = set(names)
    if unknown := [name for name in found if name not in known]:
        raise UserError(
            f"The recipe's task returned the metric {unknown[0]}, which it does not declare.",
            why="every process has to know the names of all metrics beforehand.",
            do=f"add {unknown[0]} to its `metric_names`",
        )
