"""The handle of a staged collective: waiting for it copies the results to the device."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.distributed_c10d import Work

from crosstune.torch_engine.sharding.staged_copies import HostCopies


class StagedWork(Work):
    """Works of gloo that belong to one collective. The tensors hold the results once `wait` has returned."""

    def __init__(
        self,
        works: Sequence[Any],
        copies: HostCopies,
        outputs: Sequence[torch.Tensor],
        *,
        divisor: int | None = None,
    ) -> None:
        """`divisor` makes a mean out of a sum."""
        super().__init__()
        self._works, self._copies, self._outputs, self._divisor = list(works), copies, list(outputs), divisor
        self._lock = threading.Lock()
        self._is_done = False

    def wait(self, *timeout: Any, **named: Any) -> bool:
        """Wait for gloo, and copy the results on the first call. An error of gloo is raised here."""
        with self._lock:
            if not self._is_done:
                for work in self._works:
                    work.wait(*timeout, **named)
                self._complete()
        return True

    def is_completed(self) -> bool:
        """Return whether the results are in place; copy them if gloo has finished."""
        if not self._is_done and all(work.is_completed() for work in self._works):
            self.wait()
        return self._is_done

    def is_success(self) -> bool:
        return self._is_done

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future that is complete already: a copy from another thread could be late for its reader."""
        self.wait()
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self._outputs)
        return future

    def _complete(self) -> None:
        if self._divisor is not None:
            for host in self._copies.results:
                host.div_(self._divisor)
        self._copies.finish()
        self._is_done = True
