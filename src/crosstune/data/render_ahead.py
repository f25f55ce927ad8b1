"""Render the rows of a source in batches: each is rendered while the caller uses the one before."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import TypeVar

from crosstune.core.errors import UserError
from crosstune.data.render_types import ChatTokens, Rendered, RenderRow
from crosstune.data.rendering import Renderer

# Large enough to keep all cores busy, small enough that the token offsets take a few dozen megabytes.
BATCH_CHARACTERS = 256 << 10
BATCH_TEXTS = 512

Place = TypeVar("Place")
Request = Rendered | RenderRow
"""A row to render, or one that needs no rendering."""


def render_ahead(
    requests: Iterable[tuple[Place, Request]], tokens: ChatTokens, *, renderer: Renderer
) -> Generator[tuple[Place, Rendered | UserError], None, None]:
    """Yield the text of each row in order, with whatever came with it, up to the first that gives an error.

    A UserError of `requests` is raised after the rows before it, so that the first bad row is the one reported.
    """
    batches = _batches(requests)
    pending: tuple[Sequence[tuple[Place, Request]], Future[list[Rendered | UserError]]] | None = None
    failure: UserError | None = None
    stop = Event()
    with ThreadPoolExecutor(max_workers=1) as thread:
        try:
            while True:
                try:
                    batch = next(batches, [])
                except UserError as error:
                    batch, failure = [], error
                submitted = (batch, thread.submit(_render, batch, tokens, renderer, stop)) if batch else None
                if pending is not None:
                    results = pending[1].result()
                    # They end with the first error.
                    yield from zip((place for place, _ in pending[0]), results, strict=False)
                    if isinstance(results[-1], UserError):
                        stop.set()
                        return
                if (pending := submitted) is None:
                    break
        except BaseException:
            stop.set()  # the thread would go on until its batch is rendered
            raise
    if failure is not None:
        raise failure


def _batches(requests: Iterable[tuple[Place, Request]]) -> Iterator[list[tuple[Place, Request]]]:
    batch: list[tuple[Place, Request]] = []
    characters = 0
    try:
        for place, request in requests:
            batch.append((place, request))
            characters += len(request.body if isinstance(request, RenderRow) else request.text)
            if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_TEXTS:
                yield batch
                batch, characters = [], 0
    except UserError:
        if batch:  # an empty one would be taken for the end, and the error for none
            yield batch
        raise
    if batch:
        yield batch


def _render(
    batch: Sequence[tuple[Place, Request]], tokens: ChatTokens, renderer: Renderer, stop: Event
) -> list[Rendered | UserError]:
    rows = [request for _, request in batch if isinstance(request, RenderRow)]
    rendered = iter(renderer.render_rows(rows, tokens, stop=stop))
    results: list[Rendered | UserError] = []
    for _, request in batch:
        results.append(request if isinstance(request, Rendered) else next(rendered))
        if isinstance(results[-1], UserError):
            break
    return results
