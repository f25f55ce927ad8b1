"""`crosstune chat`: chat with a model or a trained run."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from crosstune.cli.arguments import Parser
from crosstune.cli.generate import add_model_arguments

HELP = (
    "Ctrl-C interrupts an answer, /reset clears the conversation, /quit (or Ctrl-D) exits, /help shows this"
)


def make_parser() -> Parser:
    parser = Parser("chat", description="Chat with a model or a trained run.", epilog=f"in the chat: {HELP}")
    add_model_arguments(parser)
    return parser


def run(words: Sequence[str]) -> int:
    own = make_parser().parse_args(list(words))

    from crosstune.cli.screen import Screen
    from crosstune.results.chat_model import open_chat_model

    chat_model = open_chat_model(
        own.model, observer=Screen(live=True), backend=own.backend, precision=own.precision
    )
    start = [{"role": "system", "content": own.system}] * bool(own.system)
    messages = list(start)
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401  (line editing and history for input())

        print(HELP)
    while (line := _read_line(interactive)) is not None:
        if line in ("/quit", "/exit"):
            break
        if line == "/help":
            print(HELP)
        elif line == "/reset":
            messages = list(start)
        elif line:
            asked = [*messages, {"role": "user", "content": line}]
            try:
                answer = chat_model.answer(
                    asked,
                    max_new_tokens=own.max_new_tokens,
                    temperature=own.temperature,
                    seed=own.seed,
                    on_text=lambda text: print(text, end="", flush=True),
                )
            except KeyboardInterrupt:
                print(" ... (interrupted and discarded)")
                continue
            print()
            messages = [*asked, {"role": "assistant", "content": answer}]
    return 0


def _read_line(interactive: bool) -> str | None:
    """Return the user's next line, or None at the end of the input."""
    try:
        return input("> " if interactive else "").strip()
    except EOFError:
        return None
