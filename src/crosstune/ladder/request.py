"""Check the request of a ladder before anything is measured, and match it with the ladder that a folder holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from crosstune.config.load import make_config
from crosstune.config.schema import Config
from crosstune.core.errors import UserError
from crosstune.core.json_files import read_object, write_json
from crosstune.report.files import mapping

REQUEST = "request.json"
NOT_CARRIED = ("name", "output_dir", "overwrite", "resume", "num_epochs", "max_steps", "profile")
"""Options that trials leave out; the last three return in train.yaml."""
_PLACE = ("name", "output_dir", "overwrite")
"""Options that do not change what a ladder measures."""


def check_request(config: Config) -> None:
    """Check the options as `train` does before its first step, and refuse those that no trial can have."""
    from crosstune.runs.check_request import check_plan
    from crosstune.runs.resume import names_path

    if names_path(config):
        raise UserError(
            f"A ladder cannot start from --resume {config.resume}.",
            why="its trials are separate short trainings, and a resumed run keeps its options.",
            do="leave out --resume, and give the options of that run, such as with --config RUN/config.yaml",
        )
    if config.emulate is not None:
        raise UserError("A ladder measures this machine: --emulate does not work with it.", do="leave it out")
    asked = {k: v for k, v in config.options_asked().items() if k not in ("name", "overwrite", "resume")}
    check_plan(make_config(**asked))[1].raise_problems()


def make_request(config: Config, *, rungs: Sequence[str], steps: int, goal: str) -> dict[str, Any]:
    """Return the request that identifies a ladder in its folder."""
    options = {name: value for name, value in config.options_asked().items() if name not in _PLACE}
    return {"options": options, "rungs": list(rungs), "steps": steps, "goal": goal}


def check_same_ladder(folder: Path, request: Mapping[str, Any]) -> None:
    """Raise unless the folder is new, holds the same request, or one that measured nothing."""
    path = folder / REQUEST
    if path.is_file():
        try:
            before = read_object(path)
        except UserError as error:
            raise UserError(
                f"The ladder in {folder} is damaged: {path.name} cannot be read.",
                why=error.why,
                do="use another --name, or --overwrite true to begin again",
            ) from error
        if before == dict(request):
            return
        if any((folder / "trials").glob("*/summary.json")):
            raise UserError(
                f"{folder} holds a ladder of another request.",
                why=f"these differ: {', '.join(_differing(before, request))}.",
                do="use another --name, or --overwrite true to begin again",
            )
    elif folder.is_dir() and any(folder.iterdir()):
        raise UserError(f"{folder} exists and is no ladder.", do="use another --name")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, dict(request))


def _differing(before: Mapping[str, Any], request: Mapping[str, Any]) -> list[str]:
    """Return the flags that differ."""
    old, new = mapping(before.get("options")), mapping(request.get("options"))
    return [
        *sorted(f"--{key}" for key in {*old, *new} if old.get(key) != new.get(key)),
        *(f"--{key}" for key in ("rungs", "steps", "goal") if before.get(key) != request.get(key)),
    ]
