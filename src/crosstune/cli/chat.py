"""`crosstune chat`: chat with a model or a trained run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from crosstune.cli.arguments import Parser
from crosstune.cli.generate import add_model_arguments, open_model, read_sampling
from crosstune.cli.output import print_error
from crosstune.core.errors import UserError
from crosstune.core.names import nearest

if TYPE_CHECKING:
    from crosstune.core.sampling import Sampling
    from crosstune.results.chat_model import ChatModel
    from crosstune.results.conversation import Conversation

COMMANDS = {
    "/help": "show this list",
    "/save FILE": "write the conversation to FILE, as JSON lines that train and generate read",
    "/load FILE": "continue the conversation in FILE",
    "/system TEXT": "set the system message; without TEXT, remove it",
    "/reset": "forget the conversation, except the system message",
    "/exit": "leave (also /quit and Ctrl-D)",
}
HELP = "\n".join(f"  {command:<13} {text}" for command, text in COMMANDS.items())
NOTES = (
    "Ctrl-C interrupts an answer. A message that begins with a slash is written with two: //etc is a folder."
)
EXAMPLES = f"""examples:
  crosstune chat runs/demo
  crosstune chat smollm2-135m --system "Answer in one sentence." --temperature 0.7 --top_p 0.9

in the chat:
{HELP}
{NOTES}"""


def make_parser() -> Parser:
    parser = Parser("chat", description="Chat with a model or a trained run.", epilog=EXAMPLES)
    add_model_arguments(parser)
    return parser


def run(words: Sequence[str]) -> int:
    own = make_parser().parse_args(list(words))
    sampling = read_sampling(own)

    from crosstune.results.conversation import Conversation

    chat_model = open_model(own)
    conversation = Conversation(system=own.system)
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401  (line editing and history for input())

        _say("/help lists the commands; Ctrl-C interrupts an answer, Ctrl-D leaves.")
    while (line := _read_line(interactive)) is not None:
        if line.startswith("/") and not line.startswith("//"):
            if not _obey(line, conversation):
                break
        elif line:
            _answer(chat_model, conversation, line.removeprefix("/"), own, sampling)
    return 0


def _answer(
    chat_model: ChatModel, conversation: Conversation, line: str, own: argparse.Namespace, sampling: Sampling
) -> None:
    """Print the answer to a message and add both to the conversation."""
    try:
        answer = chat_model.answer(
            conversation.with_question(line),
            max_new_tokens=own.max_new_tokens,
            sampling=sampling,
            on_text=lambda text: print(text, end="", flush=True),
        )
    except KeyboardInterrupt:
        print(" ... (interrupted and discarded)")
    except UserError as error:  # such as a chat template that refuses a system message
        print_error(error.lines())
    else:
        print()
        conversation.add(line, answer)


def _obey(line: str, conversation: Conversation) -> bool:
    """Carry out a command; return False to leave. An unknown one is not sent to the model."""
    name, _, rest = line.partition(" ")
    rest = rest.strip()
    if name in ("/exit", "/quit"):
        return False
    try:
        if name == "/help":
            _say(f"{HELP}\n{NOTES}")
        elif name == "/reset":
            conversation.reset()
            _say("The conversation is empty.")
        elif name == "/system":
            conversation.system = rest
            _say("The system message is set." if rest else "There is no system message.")
        elif name in ("/save", "/load"):
            _use_file(name, rest, conversation)
        else:
            raise _unknown(name)
    except UserError as error:
        print_error(error.lines())
    return True


def _use_file(name: str, rest: str, conversation: Conversation) -> None:
    if not rest:
        raise UserError(f"{name} needs the name of a file.", do=f"{name} chat.jsonl")
    path = Path(rest).expanduser()
    if name == "/save":
        conversation.save(path)
        _say(f"saved    {path}")
    else:
        conversation.load(path)
        _say(f"loaded   {path}, {len(conversation.turns)} messages")


def _unknown(name: str) -> UserError:
    known = [command.split(" ")[0] for command in COMMANDS]
    close = nearest(name, known)
    hint = f"did you mean {close[0]}? " if close else ""
    return UserError(
        f"There is no command {name}; the model was not asked.",
        do=f"{hint}/help lists the commands; to send a message that begins with a slash, write two: /{name}",
    )


def _say(text: str) -> None:
    from crosstune.cli.output import QUIET, Output

    Output().line(text, style=QUIET)


def _read_line(interactive: bool) -> str | None:
    """Return the user's next line, or None at the end of the input."""
    try:
        return input("> " if interactive else "").strip()
    except EOFError:
        return None
    except KeyboardInterrupt:  # clears what was typed, as in a shell
        print()
        return ""
