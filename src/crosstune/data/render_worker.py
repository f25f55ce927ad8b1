"""Render batches of conversations in a process of its own, under limits of the system on CPU time and memory.

Requests and replies are JSON behind a header (see `render_types`). The process ends when its input does, so it does not
outlive the process that started it.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

from crosstune.core.errors import UserError
from crosstune.data.chat import effective_extras, render, render_conversation
from crosstune.data.render_types import (
    EXIT_OUT_OF_MEMORY,
    REPLY_HEADER,
    REQUEST_HEADER,
    ChatTokens,
    template_error,
)

MOST_REPLY_CHARACTERS = 32 << 20
"""A reply with more text than this ends early; the remaining rows are requested again."""
# The signals of a terminal and of job schedulers are for the parent, which may still render after one of them.
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    """Say that the process is ready, then answer requests until the input ends."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        resource.setrlimit(limit, (0, 0))
    try:
        _reply(b"")
        _serve()
    except MemoryError:
        os._exit(EXIT_OUT_OF_MEMORY)
    except BrokenPipeError:
        os._exit(0)  # the parent is gone


def _serve() -> None:
    start_bytes = _address_space_bytes()
    tokens = ChatTokens(chat_template=None)
    while header := sys.stdin.buffer.read(REQUEST_HEADER.size):
        num_bytes, memory_bytes = REQUEST_HEADER.unpack(header)
        if start_bytes is not None:
            _limit_memory(start_bytes + memory_bytes)
        batch = json.loads(sys.stdin.buffer.read(num_bytes))
        if "tokens" in batch:
            tokens = ChatTokens.from_json(batch["tokens"])
        replies = _render_rows(batch, tokens, memory_bytes=memory_bytes)
        _reply(json.dumps(replies, ensure_ascii=False).encode(errors="surrogatepass"))


def _reply(body: bytes) -> None:
    sys.stdout.buffer.write(REPLY_HEADER.pack(len(body)) + body)
    sys.stdout.buffer.flush()


def _render_rows(batch: dict[str, Any], tokens: ChatTokens, *, memory_bytes: int) -> list[Any]:
    """Return what each row gives, up to the first error or the longest reply."""
    replies: list[Any] = []
    characters = 0
    for row, cpu_s in zip(batch["rows"], batch["cpu_s"], strict=True):
        # The signal of this timer ends the process, also inside a single call that never returns.
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        try:
            reply = _render_row(row, tokens)
        except UserError as error:
            reply = _parts(error)
        except MemoryError:
            why = f"it takes more than {memory_bytes >> 20:,} MiB of memory"
            reply = _parts(template_error(tokens.template_file, "render this conversation", why=why))
        replies.append(reply)
        if isinstance(reply, dict):
            break
        characters += len(reply[0])
        if characters > MOST_REPLY_CHARACTERS:
            break
    signal.setitimer(signal.ITIMER_PROF, 0)
    return replies


def _render_row(row: dict[str, Any], tokens: ChatTokens) -> Any:
    """Return the fields of `Rendered` in their order."""
    messages, tools, kind = row["messages"], row["tools"], row["kind"]
    if kind in ("prompt", "text"):
        return [render(messages, tokens, add_generation_prompt=kind == "prompt", tools=tools), [], 0, []]
    rendered = render_conversation(messages, tokens, whole=kind == "whole", tools=tools)
    extras = effective_extras(messages, tokens, row["extras"], tools=tools)
    return [rendered.text, rendered.spans, rendered.num_unlocated, sorted(extras)]


def _parts(error: UserError) -> dict[str, str]:
    return {"asked": error.asked, "why": error.why, "do": error.do}


def _address_space_bytes() -> int | None:
    """Return the size of this process's address space; None where the system does not limit it (macOS), so that the
    parent watches the memory alone."""
    if not sys.platform.startswith("linux"):
        return None
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _limit_memory(num_bytes: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        num_bytes = min(num_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, hard))
