"""Ctrl-C ends a command without a traceback, even while Python imports it."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from crosstune.cli.main import run_interruptible

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs SIGINT for one process")

_INTERRUPTED_IMPORT = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == MODULE:
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(1000):
                pass  # Python handles a signal between two instructions

sys.meta_path.insert(0, Finder())
sys.argv[1:] = ["options", "lr"]
from crosstune.__main__ import start
sys.exit(start())
"""


@pytest.mark.parametrize(
    "module", ["crosstune.cli.main", "crosstune.cli.commands.options", "crosstune.config.table"]
)
def test_while_python_imports_the_command(module: str) -> None:
    code = _INTERRUPTED_IMPORT.replace("MODULE", repr(module))
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 130, ended
    assert "Traceback" not in ended.stderr and "crosstune: stopped." in ended.stderr


def test_an_ignored_signal_stays_ignored() -> None:
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)" + _INTERRUPTED_IMPORT
    code = code.replace("MODULE", "'crosstune.cli.main'")
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended


def test_an_import_that_hides_ctrl_c(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)

    def load() -> int:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise ImportError("numpy could not be imported") from error

    assert run_interruptible(load, is_process=False) == 130
    assert "stopped" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(ImportError):
        run_interruptible(lambda: __import__("no_such_module_of_ours").x, is_process=False)
