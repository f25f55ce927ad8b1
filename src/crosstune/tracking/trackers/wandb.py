"""Weights & Biases: online with a key, or in offline files in the folder `wandb` of the run (WANDB_MODE=offline)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crosstune.config.load import add_variables, launch_variables, remove_variables
from crosstune.files.plain_files import free_space
from crosstune.tracking.tracker import Place, Rows, TrackedRun, Unavailable, Values

PACKAGE = "wandb"
ENVIRONMENT: Mapping[str, str] = {
    "WANDB_SILENT": "true",
    "WANDB_ERROR_REPORTING": "false",  # no reports of its own errors to another service
}
START_S = 30.0
"""Time limit for its server to answer."""
FINISH_S = 45.0
"""Time limit for the last uploads; the rest stays in the run folder, for `wandb sync`."""
NO_ROOM_BYTES = 1 << 16
"""A disk with less free space is full."""


class Tracker:
    repeats = False  # its server accepts each step once

    def start(self, run: TrackedRun) -> Place:
        # For tables to be uploaded; by default wandb keeps them in the home folder.
        self._added = add_variables({"WANDB_DATA_DIR": str(run.folder / "wandb")})
        import wandb
        from wandb.errors import CommError, UsageError

        self._wandb = wandb
        try:
            self._run = wandb.init(
                project=run.project_or("WANDB_PROJECT"),
                entity=run.entity,
                group=run.group,
                name=run.name,
                id=run.id,
                dir=None if "WANDB_DIR" in launch_variables() else str(run.folder),
                resume="allow",
                reinit="create_new",  # keep a run of the caller open
                config=dict(run.config),
                settings=_settings(),
            )
        except (UsageError, CommError) as error:
            raise Unavailable(_explained(error)) from error
        if self._run.disabled:
            return Place(where="nowhere: WANDB_MODE=disabled")
        if not self._run.offline:
            return Place(where=str(self._run.url))
        files = str(self._run.settings.sync_dir)
        return Place(where=f"offline files in {files}", view=f"wandb sync {files}")

    def log(self, values: Values, *, step: int) -> None:
        self._run.log(dict(values), step=step)

    def log_rows(self, name: str, rows: Rows, *, step: int) -> None:
        columns: list[str | int] = list(rows[0])
        table = self._wandb.Table(
            columns=columns, data=[[row.get(str(key)) for key in columns] for row in rows]
        )
        self._run.log({name: table}, step=step)

    def finish(self, summary: Mapping[str, Any], *, succeeded: bool) -> None:
        self._run.summary.update({f"run/{name}": value for name, value in summary.items()})
        self._run.finish(exit_code=0 if succeeded else 1)
        remove_variables(self._added)
        files = Path(self._run.settings.sync_dir)
        if files.is_dir() and free_space(files) < NO_ROOM_BYTES:  # wandb does not report it
            raise Unavailable(f"the disk of {files} is full; values are missing")


def _settings() -> Any:
    """Let wandb collect the load of the machine, but nothing about its user and code."""
    from wandb import Settings

    return Settings(
        console="off",  # the terminal is not recorded
        disable_code=True,
        save_code=False,
        disable_git=True,
        x_disable_meta=True,  # the names of user and program
        host="",
        x_save_requirements=False,
        symlink=False,
        silent=True,
        init_timeout=START_S,
        finish_timeout=FINISH_S,
        finish_timeout_raises=True,
    )


def _explained(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    offline = "WANDB_MODE=offline keeps the values in the run folder"
    if "api key" in lines[0].lower():
        return f"it has no valid key: log in with `wandb login`, or {offline}"
    return f"{lines[0].rstrip('.')}; {offline}"
