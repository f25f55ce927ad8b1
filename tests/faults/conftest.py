"""A warm process in which the tests of this tier run commands."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from warm_process import WarmProcess

import crosstune


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmProcess]:
    """Commands run in forks of it, as processes of their own that can be signalled and killed."""
    source = str(Path(crosstune.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    process = WarmProcess(tmp_path_factory.mktemp("warm"), environment)
    yield process
    process.close()
