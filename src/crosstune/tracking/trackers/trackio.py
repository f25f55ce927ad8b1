"""trackio: a database on this machine, or a server or Space if TRACKIO_SERVER_URL or TRACKIO_SPACE_ID is set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from crosstune.tracking.tracker import Place, Rows, TrackedRun, Unavailable, Values
from crosstune.tracking.values import numbers

PACKAGE = "trackio"
ENVIRONMENT: Mapping[str, str] = {"HF_HUB_DISABLE_TELEMETRY": "1"}


class Tracker:
    repeats = False  # it would keep both rows of a repeated step

    def start(self, run: TrackedRun) -> Place:
        import trackio
        from trackio.utils import TRACKIO_DIR

        self._trackio = trackio
        try:
            self._run = trackio.init(
                project=run.project,
                name=run.name,
                group=run.group,
                config=dict(run.config) | {"id": run.id},
                resume="allow" if run.continues else "never",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        except ValueError as error:  # about the project's name, or a server without a token
            raise Unavailable(str(error)) from error
        where = self._run.url or str(TRACKIO_DIR)
        return Place(where=str(where), view=f'trackio show --project "{run.project}"')

    def log(self, values: Values, *, step: int) -> None:
        self._run.log(dict(values), step=step)

    def log_rows(self, name: str, rows: Rows, *, step: int) -> None:
        columns = list(rows[0])
        table = self._trackio.Table(columns=columns, data=[[row.get(key) for key in columns] for row in rows])
        self._run.log({name: table}, step=step)

    def finish(self, summary: Mapping[str, Any], *, succeeded: bool) -> None:
        if found := numbers("run", summary):
            self._run.log(found, step=int(summary.get("steps") or 0))
        self._run.finish()
