"""`crosstune.train`: fine-tune a model from a Python program or a notebook."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from crosstune.api.arguments import (
    Data,
    OptionValue,
    PathLike,
    SavesTokenizer,
    Written,
    read_config,
    reject_positional,
    rephrase_errors,
)
from crosstune.api.callbacks import Callback, Callbacks, keep_process_state
from crosstune.api.model import Model, load
from crosstune.api.notebook import LiveCell, framed, has_kernel
from crosstune.cli.commands.train import after_restart, finish_together, show_training
from crosstune.core.errors import UserError
from crosstune.core.events import Evaluated
from crosstune.files.json_files import read_json, read_jsonl
from crosstune.files.paths import named_run


class Run:
    """A run that has ended. `Run(folder)` opens an earlier run, also by its name in the default runs folder."""

    def __init__(self, folder: PathLike, *, summary: dict[str, Any] | None = None) -> None:
        self.folder = Path(named_run(os.fspath(folder))).expanduser()
        if summary is None and not (self.folder / "plan.json").is_file():
            raise UserError(f"{self.folder} is not a run.", why="it has no plan.json.")
        self.summary: dict[str, Any] = (
            summary if summary is not None else read_json(self.folder / "summary.json")
        )
        """The contents of summary.json; empty for a run that is running or was killed."""

    @property
    def status(self) -> str:
        """`finished`, `stopped` or `failed`; `unfinished` for a run that is running or was killed."""
        return str(self.summary.get("status", "unfinished"))

    @property
    def stop_reason(self) -> str | None:
        """Why the run stopped: a signal, the time limit, or a callback's reason."""
        return self.summary.get("stop_reason")

    @property
    def result(self) -> Path | None:
        """The folder of the trained adapter or model."""
        return Path(name) if (name := self.summary.get("result")) else None

    @property
    def checkpoint(self) -> Path | None:
        """The newest checkpoint."""
        return Path(name) if (name := self.summary.get("checkpoint")) else None

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl, one per step, with `eval_loss` and other `eval_` metrics at evaluated steps."""
        evaluated: dict[int, dict[str, Any]] = {}
        for event in self.events:
            if event.get("kind") == Evaluated.kind and event.get("step") is not None:
                found = {f"eval_{name}": value for name, value in (event.get("metrics") or {}).items()}
                evaluated.setdefault(event["step"], {}).update(found)
        return [row | evaluated.get(row["step"], {}) for row in read_jsonl(self.folder / "metrics.jsonl")]

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
        """Answer a prompt with the trained model and keep it loaded; `load()` gives more control."""
        return self._model.generate(
            prompt, system=system, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed
        )

    def _repr_html_(self) -> str:
        """Show the result and the curves in a notebook."""
        from crosstune.report import load_run, render

        return framed(render(load_run(self.folder), template="cell.html.jinja"))

    def __repr__(self) -> str:
        facts = [f"status={self.status!r}"]
        for name in ("steps", "final_loss", "eval_loss"):
            if self.summary.get(name) is not None:
                facts.append(f"{name}={self.summary[name]:.6g}")
        return f"Run({str(self.folder)!r}, {', '.join(facts)})"


def train(
    *given: NoReturn,
    dataset: Data | None = None,
    eval_dataset: Data | None = None,
    tokenizer: PathLike | SavesTokenizer | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool = True,
    **options: OptionValue,
) -> Run:
    """Fine-tune a model. `options` are the options of `crosstune train`; `crosstune options` lists them.

    A dataset is a path, a name, a list of rows, or a `datasets.Dataset`; a tokenizer is a folder or a fast transformers
    tokenizer. Ctrl-C and callbacks stop the run after the current step, with a checkpoint. `progress=False` prints nothing.
    """
    from crosstune.distributed.environment import read_ranks
    from crosstune.distributed.group import connected, errors_with_rank
    from crosstune.loop.stop import StopSignal

    reject_positional("train", given)
    stop, written = StopSignal(), Written()
    with rephrase_errors(written):
        called = Callbacks(callbacks, stop)
        data = {"dataset": dataset, "eval_dataset": eval_dataset, "tokenizer": tokenizer}
        config = read_config(options, written=written, **data)
        with keep_process_state(), connected(config, read_ranks(config)) as group, errors_with_rank(group):
            try:
                cell = LiveCell() if progress and has_kernel() else None
                result, _ = show_training(
                    after_restart(config, group),
                    group,
                    observers=[*([cell] if cell else []), called],
                    stop=stop,
                    quiet=not progress,
                    line=cell,
                )
                finish_together(result, group)
            except UserError as error:
                if called.error is not None:
                    raise called.error from error
                raise
    if called.error is not None:
        raise called.error
    return Run(result.folder, summary=result.summary)
