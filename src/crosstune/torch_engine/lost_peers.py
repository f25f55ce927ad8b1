"""Recognize errors of collectives that mean that another process is gone or does not answer."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import torch.distributed as dist

from crosstune.core.errors import PeerLost, UserError
from crosstune.core.ranks import Ranks

_LOST = re.compile(
    r"connection (was )?(closed|reset|refused|timed out|aborted)|broken pipe|socket (closed|timeout)"
    r"|timed out waiting|wait timeout|watchdog|peer closed|unhandled system error|remote process exited"
    r"|ncclremoteerror|ncclsystemerror|gloo (send|recv)|application timeout|read error|writev? error",
    re.IGNORECASE,
)
_MISMATCH = re.compile(r"Detected mismatch between collectives on ranks")
_FROM_A_COLLECTIVE = re.compile(r"gloo|nccl|xccl|c10d|socket|store|process ?group", re.IGNORECASE)


@contextlib.contextmanager
def peer_errors(ranks: Ranks, *, doing: str) -> Iterator[None]:
    """Raise PeerLost for errors of collectives inside the block that come from another process, and a UserError for
    collectives that differ, which torch compares with --debug_collectives."""
    try:
        yield
    except RuntimeError as error:  # also DistBackendError, DistNetworkError and DistStoreError
        if _MISMATCH.search(str(error)):
            raise UserError(
                f"{ranks.name}: the processes of the run do different collectives in {doing}.",
                why=_first_line(error),
                do="a model or recipe must do the same operations on every process; the message names the one that differs",
            ) from error
        if not is_lost_peer(error):
            raise
        raise PeerLost(
            f"{ranks.name} lost the connection to another process in {doing}.",
            why=_first_line(error),
            do="read the last output of that process; --resume continues the run from its newest checkpoint",
        ) from error


def is_lost_peer(error: RuntimeError) -> bool:
    """Return whether an error of torch means that another process is gone, or did not answer in time."""
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        return True
    text = str(error)
    return bool(
        _LOST.search(text) and (isinstance(error, dist.DistBackendError) or _FROM_A_COLLECTIVE.search(text))
    )


def _first_line(error: RuntimeError) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
