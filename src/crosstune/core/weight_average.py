"""Use the moving average of the trained weights, where a session keeps one."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from crosstune.core.protocols import Array, Session, SessionState

SLOT = "average"
"""The name of the average among the optimizer's moments in a checkpoint."""


@runtime_checkable
class AveragesWeights(Protocol):
    def averaged(self) -> contextlib.AbstractContextManager[None]:
        """Put the average in the place of the weights inside the block."""
        ...


def averaged(session: Session) -> contextlib.AbstractContextManager[None]:
    """Use the session's average inside the block; the weights themselves where it keeps none."""
    return session.averaged() if isinstance(session, AveragesWeights) else contextlib.nullcontext()


def result_weights(state: SessionState) -> Mapping[str, Array]:
    """Return the weights of a checkpoint that a result is made from: their average, where there is one."""
    return state.moments.get(SLOT) or state.weights
