"""A real training in a real terminal: what is on its screen, read back cell by cell."""

from __future__ import annotations

import fcntl
import os
import re
import select
import struct
import termios
from pathlib import Path

import pytest
import warm

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


def show(words: list[str], *, width: int) -> Cells:
    controller, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    variables = {"COLUMNS": None, "NO_COLOR": None, "TERM": "xterm-256color"}
    process = warm.start_command(words, place=os.ttyname(terminal), variables=variables)
    written = b""
    while process.poll() is None or select.select([controller], [], [], 0)[0]:
        if select.select([controller], [], [], 0.05)[0]:
            written += os.read(controller, 65536)
    os.close(terminal)
    os.close(controller)
    assert process.end()[0] == 0, written.decode()
    cells = Cells(width)
    cells.feed(written.decode())
    return cells


@pytest.mark.parametrize("width", [40, 100])
def test_a_training_fits_the_terminal_and_leaves_no_stale_rows(width: int, tmp_path: Path) -> None:
    flags = (
        "--model_name tiny-random --dataset commands --dataset_samples 64 --eval_samples 16 --max_new_tokens 4 "
        "--num_samples 1 --max_steps 6 --eval_steps 3 --backend cpu --precision fp32 --name run --output_dir"
    )
    cells = show(["train", *flags.split(), str(tmp_path)], width=width)
    assert cells.num_wrapped == 0
    assert max(map(len, cells.rows)) <= width
    bars = [row for row in cells.seen if "━" in row or "─" in row]
    assert any(re.match(r"(step )?\d+/6 [━─]{6,}  loss \d", row) for row in bars), bars
    assert any(row.startswith("evaluating step") for row in bars), bars
    left = "\n".join(cells.rows)
    assert "━" not in left and "evaluating" not in left
    words = left.split()
    for word in ("finished", "exact_match", "crosstune", "supervised,"):
        assert word in words, word
