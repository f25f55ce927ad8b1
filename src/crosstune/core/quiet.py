"""Hide the output of libraries: a command shows its own progress."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator


@contextlib.contextmanager
def hide_output() -> Iterator[None]:
    """Drop standard output and standard error inside the block. Errors must be raised."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield
