"""Choose the folder of a run."""

from __future__ import annotations

import itertools
from datetime import datetime
from pathlib import Path

from crosstune.config.schema import Config
from crosstune.core.errors import UserError
from crosstune.core.plain_files import is_file_name
from crosstune.planner.gather import needs_base_model

LONGEST_NAME_BYTES = 200
"""File systems allow 255, and staging folders add to the name."""


def run_folder(config: Config) -> Path:
    """Return the run folder, named by --name, or by the time and the model (or recipe, if it brings its own model)."""
    parent = Path(config.output_dir).expanduser()
    if config.name is None:
        what = config.model_name if needs_base_model(config) else config.recipe
        stem = f"{datetime.now():%Y%m%d-%H%M%S}-{Path(what.rstrip('/')).name[:80]}"
        names = (stem if number == 1 else f"{stem}-{number}" for number in itertools.count(1))
        return next(parent / name for name in names if not (parent / name).exists())
    name = config.name
    if not is_file_name(name, longest_bytes=LONGEST_NAME_BYTES):
        raise UserError(
            f"'{name:.80}' cannot be the name of a run.",
            do=f"use a plain folder name of at most {LONGEST_NAME_BYTES} bytes; --output_dir sets its parent",
        )
    return parent / name
