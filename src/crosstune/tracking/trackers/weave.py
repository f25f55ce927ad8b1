"""Weave: evaluations and samples as traces, the steps of a run as a dataset. It has no offline mode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from crosstune.config.load import launch_variables
from crosstune.files.json_files import read_jsonl
from crosstune.tracking.tracker import Place, Rows, TrackedRun, Unavailable, Values

PACKAGE = "weave"
ENVIRONMENT: Mapping[str, str] = {
    "WANDB_ERROR_REPORTING": "false",
    "WEAVE_PRINT_CALL_LINK": "false",
    "WEAVE_IMPLICITLY_PATCH_INTEGRATIONS": "false",
    "WEAVE_CAPTURE_CODE": "false",
    "WEAVE_CAPTURE_SYSTEM_INFO": "false",
    "WEAVE_CAPTURE_CLIENT_INFO": "false",
    "WEAVE_ENABLE_DISK_FALLBACK": "false",  # it would write unsent data into the working folder
    "WEAVE_USE_SERVER_CACHE": "false",
}
MAX_STEPS = 20_000
"""Maximum steps in the dataset of a run; a longer run is thinned out."""


class Tracker:
    repeats = False

    def start(self, run: TrackedRun) -> Place:
        import weave
        from weave.trace.env import weave_wandb_api_key

        if _is_offline():
            raise Unavailable("weave has no offline mode, but WANDB_MODE forbids a connection")
        if not weave_wandb_api_key():
            raise Unavailable("there is no key; log in with `wandb login`, or set WANDB_API_KEY")
        self._weave, self._tracked = weave, run
        project = run.project_or("WANDB_PROJECT")
        self._client = weave.init(f"{run.entity}/{project}" if run.entity else project)
        self._call = self._client.create_call(
            op="crosstune.train",
            inputs={"run": run.name, "id": run.id, "resumes_at": run.resumes_at, "config": dict(run.config)},
            display_name=run.name,
            use_stack=False,
        )
        return Place(where=str(self._call.ui_url))

    def log(self, values: Values, *, step: int) -> None:
        """Trace an evaluation or a test; steps are published at the end."""
        kinds = {name.partition("/")[0] for name in values}
        if "train" in kinds:
            return
        self._trace(f"crosstune.{min(kinds)}", {"step": step}, _plain(values))

    def log_rows(self, name: str, rows: Rows, *, step: int) -> None:
        for row in rows:
            given = {key: item for key, item in row.items() if key != "answer"}
            output = {"answer": row["answer"]} if "answer" in row else dict(row)
            self._trace(f"crosstune.{name.replace('/', '.')}", {"step": step} | given, output)

    def finish(self, summary: Mapping[str, Any], *, succeeded: bool) -> None:
        self._publish_steps()
        failure = None if succeeded else RuntimeError(str(summary.get("status") or "the process was killed"))
        self._client.finish_call(self._call, output=_plain(summary), exception=failure)
        self._client.finish()

    def _trace(self, op: str, inputs: dict[str, Any], output: dict[str, Any]) -> None:
        call = self._client.create_call(op=op, inputs=inputs, parent=self._call, use_stack=False)
        self._client.finish_call(call, output=output)

    def _publish_steps(self) -> None:
        rows = read_jsonl(self._tracked.folder / "metrics.jsonl")
        rows = rows[:: -(-len(rows) // MAX_STEPS) or 1]
        if rows:
            data = self._weave.Dataset(name=f"{self._tracked.name}-steps", rows=rows)
            self._weave.publish(data)


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values for JSON, with NaN and infinities as text."""
    return {
        name: value if not isinstance(value, float) or value - value == 0 else str(value)
        for name, value in values.items()
    }


def _is_offline() -> bool:
    return launch_variables().get("WANDB_MODE", "").lower() in ("offline", "dryrun", "disabled")
