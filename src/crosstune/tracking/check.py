"""Check before a run that the packages of its trackers are installed."""

from __future__ import annotations

import importlib.util

from crosstune.config.log_targets import trackers_in
from crosstune.config.schema import Config
from crosstune.core.errors import UserError
from crosstune.core.names import load_plugin
from crosstune.tracking.observe import PACKAGE


def check_trackers(config: Config) -> None:
    """Raise a UserError that names the packages to install."""
    packages = [load_plugin(PACKAGE, name, kind="tracker").PACKAGE for name in trackers_in(config.log_to)]
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise UserError(
            f"--log_to {config.log_to} needs {' and '.join(missing)}, which {verb} not installed.",
            do=f"pip install {' '.join(missing)}; or all trackers: pip install 'crosstune[track]'",
        )
