"""The command's OpenMP threads sleep when they wait, unless the user's environment says how they wait."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SHOW = """
import os, sys
from crosstune.__main__ import start
sys.argv = ["crosstune", "--version"]
try:
    start()
finally:
    print("SPINS", os.environ.get("GOMP_SPINCOUNT"))
"""


@pytest.mark.parametrize(
    ("given", "found"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
)
def test_threads_wait_as_the_environment_says(given: dict[str, str], found: str) -> None:
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    said = subprocess.run([sys.executable, "-c", SHOW], env=kept | given, capture_output=True, text=True)
    assert f"SPINS {found}" in said.stdout, said
