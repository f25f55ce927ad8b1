"""What torch's allocators on the host are told before torch is imported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("MIMALLOC_PURGE_DELAY"), os.environ.get("THP_MEM_ALLOC_ENABLE"), flush=True)
            raise SystemExit
sys.meta_path.insert(0, Watch())
import crosstune.torch_engine.device
"""


@pytest.mark.parametrize(("asked", "wanted"), [({}, "-1 1"), ({"MIMALLOC_PURGE_DELAY": "50"}, "50 1")])
def test_freed_memory_is_kept_unless_the_user_decides(asked: dict[str, str], wanted: str) -> None:
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("MIMALLOC_", "THP_MEM_"))
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=kept | asked, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == wanted
