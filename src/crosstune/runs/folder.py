"""Choose the folder of a run."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from datetime import datetime
from pathlib import Path

from crosstune.config.recipe_spec import load_recipe
from crosstune.config.schema import Config

LONGEST_PART = 60
"""Characters of the model's name in the name of a run."""


def run_folder(config: Config, *, taken: Collection[Path] = ()) -> Path:
    """Return the run folder, named by --name, or by the time and the model (or recipe, if it brings its own model).

    A name made here is neither that of an existing folder nor `taken`.
    """
    parent = Path(config.output_dir).expanduser()
    if config.name is None:
        what = config.model_name if load_recipe(config.recipe).needs_base_model else config.recipe
        stem = f"{datetime.now():%Y%m%d-%H%M%S}-{Path(what.rstrip('/')).name[:LONGEST_PART]}"
        names = (stem if number == 1 else f"{stem}-{number}" for number in itertools.count(1))
        folders = (parent / name for name in names)
        return next(folder for folder in folders if not folder.exists() and folder not in taken)
    return parent / config.name
