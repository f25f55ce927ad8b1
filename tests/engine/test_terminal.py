"""A real training in a real terminal: what is on its screen, read back cell by cell."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

_PIECES = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|\x1b.|.", re.DOTALL)


class Cells:
    """A terminal that knows the few codes we use; it counts the rows that it had to wrap itself."""

    def __init__(self, width: int) -> None:
        self.width, self.rows, self.num_wrapped = width, [""], 0
        self.row = self.column = 0
        self.seen: set[str] = set()

    def feed(self, text: str) -> None:
        for piece in _PIECES.finditer(text):
            if piece.group(2) == "A":
                self.row = max(0, self.row - int(piece.group(1) or 1))
            elif piece.group(2) == "K":
                self.seen.add(self.rows[self.row])
                self.rows[self.row] = ""
            elif piece.group() == "\r":
                self.column = 0
            elif piece.group() == "\n":
                self._down()
            elif not piece.group().startswith("\x1b"):
                self._write(piece.group())

    def _write(self, character: str) -> None:
        if self.column == self.width:
            self.num_wrapped += 1
            self.column = 0
            self._down()
        row = self.rows[self.row].ljust(self.column)
        self.rows[self.row] = row[: self.column] + character + row[self.column + 1 :]
        self.column += 1

    def _down(self) -> None:
        self.row += 1
        self.rows += [""] * (self.row + 1 - len(self.rows))


def show(command: list[str], *, width: int, folder: Path) -> Cells:
    controller, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    process = subprocess.Popen(
        command,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=environment | {"TERM": "xterm-256color"},
        cwd=folder,
    )
    os.close(terminal)
    written = b""
    while True:
        try:
            written += os.read(controller, 65536)
        except OSError:  # Linux reports the end of a terminal as EIO
            break
        if not written and process.poll() is not None:
            break
    os.close(controller)
    assert process.wait(timeout=900) == 0
    cells = Cells(width)
    cells.feed(written.decode())
    return cells


@pytest.mark.parametrize("width", [40, 100])
def test_a_training_fits_the_terminal_and_leaves_no_stale_rows(width: int, tmp_path: Path) -> None:
    flags = (
        "--model_name tiny-random --dataset commands --dataset_samples 64 --eval_samples 6 --max_new_tokens 2 "
        "--num_samples 1 --max_steps 10 --eval_steps 5 --backend cpu --precision fp32 --output_dir . --name run"
    )
    command = [sys.executable, "-m", "crosstune", "train", *flags.split()]
    cells = show(command, width=width, folder=tmp_path)
    assert cells.num_wrapped == 0
    assert max(map(len, cells.rows)) <= width
    bars = [row for row in cells.seen if "━" in row or "─" in row]
    assert any(re.match(r"(step )?\d+/10 [━─]{6,}  loss \d", row) for row in bars), bars
    assert any(row.startswith("evaluating step") for row in bars), bars
    left = "\n".join(cells.rows)
    assert "━" not in left and "evaluating" not in left
    words = left.split()
    for word in ("finished", "exact_match", "crosstune", "supervised,"):
        assert word in words, word
