"""Post the state of each rank in the store of the run, where all ranks read it."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from crosstune.distributed.boards import BoardLost, State


class StoreBoard:
    """A board with a separate connection to the store: the main thread may block on the other one."""

    def __init__(self, store: dist.Store, *, size: int, timeout_s: float) -> None:
        self._store, self._size = store, size
        self._seen: set[int] = set()
        self._store.set_timeout(timedelta(seconds=timeout_s))

    def post(self, state: State) -> None:
        try:
            self._store.set(f"state/{state.rank}", state.to_text())
        except RuntimeError as error:
            raise BoardLost(str(error)) from error

    def read(self) -> dict[int, State]:
        try:
            new = [rank for rank in range(self._size) if rank not in self._seen]
            self._seen |= {rank for rank in new if self._store.check([f"state/{rank}"])}
            ranks = sorted(self._seen)
            texts = self._store.multi_get([f"state/{rank}" for rank in ranks]) if ranks else []
        except RuntimeError as error:
            raise BoardLost(str(error)) from error
        return {rank: State.from_text(text.decode()) for rank, text in zip(ranks, texts, strict=True)}
