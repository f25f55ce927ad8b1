"""Collect the decisions of a plan while it is being resolved."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from crosstune.config.facts import Facts
from crosstune.config.plan import Adjustment, Kind
from crosstune.config.schema import Config, options_by_name
from crosstune.core.errors import UserError
from crosstune.core.machine import BackendReport


@dataclass
class Draft:
    """The requested options with the values changed so far, the adjustments and the problems."""

    request: Config
    facts: Facts
    report: BackendReport
    values: dict[str, Any] = field(default_factory=dict)
    adjustments: list[Adjustment] = field(default_factory=list)
    problems: list[UserError] = field(default_factory=list)

    def __getitem__(self, option: str) -> Any:
        return self.values.get(option, getattr(self.request, option))

    def is_asked(self, option: str) -> bool:
        return option in self.request.sources

    def set(self, option: str, used: Any, reason: str, *, kind: Kind | None = None) -> None:
        """Use another value. By default it is a `change` of a value that the user set, and a `choice` otherwise."""
        requested = options_by_name()[option].written(getattr(self.request, option))
        if kind is None:
            kind = "change" if self.is_asked(option) and requested not in ("auto", None) else "choice"
        self.values[option] = used
        self.adjustments = [
            a for a in self.adjustments if a.option != option or a.kind in ("warning", "name")
        ]
        self.adjustments.append(
            Adjustment(option=option, requested=requested, used=used, reason=reason, kind=kind)
        )

    def warn(self, option: str, reason: str) -> None:
        value = self[option]
        self.adjustments.append(
            Adjustment(option=option, requested=value, used=value, reason=reason, kind="warning")
        )
