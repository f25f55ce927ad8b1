"""A run on disk: its summary, metrics and report, and the model that it trained."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from crosstune.api.arguments import PathLike
from crosstune.api.model import Model, load
from crosstune.core.errors import UserError
from crosstune.core.json_files import read_json, read_jsonl


class Run:
    """A run that has ended. `Run(folder)` opens an earlier one."""

    def __init__(self, folder: PathLike, *, summary: dict[str, Any] | None = None) -> None:
        self.folder = Path(folder).expanduser()
        if summary is None and not (self.folder / "plan.json").is_file():
            raise UserError(f"{self.folder} is not a run.", why="it has no plan.json.")
        self.summary: dict[str, Any] = (
            summary if summary is not None else read_json(self.folder / "summary.json")
        )
        """The contents of summary.json; empty for a run that is still going on or was killed."""

    @property
    def status(self) -> str:
        """`finished`, `stopped` or `failed`; `unfinished` for a run that is still going on or was killed."""
        return str(self.summary.get("status", "unfinished"))

    @property
    def stop_reason(self) -> str | None:
        """The reason of a stop: a signal, the time limit, or the reason that a callback gave."""
        return self.summary.get("stop_reason")

    @property
    def result(self) -> Path | None:
        """The folder of the trained adapter or model."""
        return _path(self.summary.get("result"))

    @property
    def checkpoint(self) -> Path | None:
        """The newest checkpoint of the run."""
        return _path(self.summary.get("checkpoint"))

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl, one for each step."""
        return read_jsonl(self.folder / "metrics.jsonl")

    @property
    def events(self) -> list[dict[str, Any]]:
        """The rows of events.jsonl: evaluations with their samples, warnings, checkpoints."""
        return read_jsonl(self.folder / "events.jsonl")

    def report(self) -> Path:
        """Write the HTML report of the run and return its path."""
        from crosstune.report import write_report

        return write_report(self.folder)

    def load(self, *, backend: str = "auto", precision: str = "auto", progress: bool = True) -> Model:
        """Open the trained model."""
        return load(self.folder, backend=backend, precision=precision, progress=progress)

    @functools.cached_property
    def _model(self) -> Model:
        return self.load()

    def generate(
        self,
        prompt: str,
        *,
        system: str = "",
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> str:
        """Answer a prompt with the trained model, which stays loaded; `load()` gives more control."""
        return self._model.generate(
            prompt, system=system, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed
        )

    def __repr__(self) -> str:
        facts = [f"status={self.status!r}"]
        for name in ("steps", "final_loss", "eval_loss"):
            if self.summary.get(name) is not None:
                facts.append(f"{name}={self.summary[name]:.6g}")
        return f"Run({str(self.folder)!r}, {', '.join(facts)})"


def _path(name: str | None) -> Path | None:
    return Path(name) if name else None
