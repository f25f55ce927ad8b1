"""Hold the plan of a request, and resolve it again when more facts are known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from crosstune.config.resolve.facts import Facts
from crosstune.config.resolve.plan import Plan
from crosstune.config.resolve.resolve import resolve
from crosstune.config.schema import Config


class Planning:
    """The plan of one request.

    A plan decides which model to fetch and how to read the data, yet it depends on facts that only the opened model and
    data have: the model's shape, the longest row. So a request is resolved with the facts of the machine first, which
    refuses a bad request before anything is fetched, and again with the facts learned later.
    """

    def __init__(self, config: Config, facts: Facts) -> None:
        self.config, self.facts = config, facts
        self._resolved: Plan | None = None

    @property
    def plan(self) -> Plan:
        if self._resolved is None:
            self._resolved = resolve(self.config, self.facts)
        return self._resolved

    def learn(self, **found: Any) -> Plan:
        """Return the plan with these `Facts` too."""
        facts = replace(self.facts, **found)
        if facts != self.facts:
            self.facts, self._resolved = facts, None
        return self.plan

    def request(self, config: Config) -> Plan:
        """Return the plan of a request in place of the first one."""
        self.config, self._resolved = config, None
        return self.plan
