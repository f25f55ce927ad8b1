"""`crosstune generate` and `crosstune chat`: answer prompts with a model or a trained run."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING

from crosstune.cli.arguments import (
    Parser,
    announce_command,
    at_least,
    print_result,
    print_written,
    read_key,
    read_path,
    read_run,
)
from crosstune.cli.terminal.output import QUIET, WARNING, Output, print_error, print_line
from crosstune.core.errors import EXIT_DONE, UserError
from crosstune.core.names import did_you_mean
from crosstune.core.sampling import Sampling

if TYPE_CHECKING:
    from crosstune.files.journal import Journal
    from crosstune.files.openai_client import ServerModel
    from crosstune.results.chat_model import ChatModel
    from crosstune.results.prompt_file import Conversation, Prompt

EXAMPLES = """examples:
  crosstune generate runs/demo --prompt "Turn off the attic fan in 20 minutes."
  crosstune generate smollm2-135m --prompt "What is the capital of France?"
  crosstune generate runs/demo --prompt "Write a poem." --temperature 0.8 --top_p 0.95 --seed 1
  crosstune generate runs/demo --prompt_file prompts.txt --output answers.jsonl
  echo "Why is the sky blue?" | crosstune generate smollm2-135m --max_new_tokens 100

A prompt file has one prompt per line, or, named *.jsonl, a JSON object per line with `prompt` or `messages`. If the last
message is the assistant's, it is the reference: hidden from the model and copied to the output."""

CHAT_COMMANDS = {
    "/help": "show this list",
    "/save FILE": "write the conversation to FILE, as JSON lines for train and generate",
    "/load FILE": "continue the conversation in FILE",
    "/system TEXT": "set the system message; without TEXT, remove it",
    "/reset": "clear the conversation, except the system message",
    "/exit": "quit (also /quit and Ctrl-D)",
}
CHAT_HELP = "\n".join(f"  {command:<13} {text}" for command, text in CHAT_COMMANDS.items())
CHAT_NOTES = "Ctrl-C interrupts an answer. Start a message with two slashes to send one: //etc is a folder."
CHAT_EXAMPLES = f"""examples:
  crosstune chat runs/demo
  crosstune chat smollm2-135m --system "Answer in one sentence." --temperature 0.7 --top_p 0.9
  crosstune chat --server http://127.0.0.1:8000              (any OpenAI-compatible server; its first model)
  crosstune chat NAME --server http://127.0.0.1:8000         (its model NAME)

in the chat:
{CHAT_HELP}
{CHAT_NOTES}"""


def make_parser() -> Parser:
    parser = Parser("generate", description="Answer prompts with a model or a trained run.", epilog=EXAMPLES)
    add_model_arguments(parser)
    add = parser.add_argument
    add("--prompt", help="the user's message (default: read standard input)")
    add("--prompt_file", type=read_path, metavar="FILE", help="read prompts from FILE, one per line")
    add("--output", type=read_path, metavar="FILE", help="write the answers to this file as JSON lines")
    add("--overwrite", action="store_true", help="replace an existing --output file")
    add("--batch_size", type=at_least(1), default=64, help="prompts answered together (default 64)")
    return parser


def run(words: Sequence[str]) -> int:
    own = make_parser().parse_args(list(words))
    sampling = read_sampling(own)
    prompts = _read_prompts(own)
    from crosstune.files.outputs import check_output

    if own.output is not None:
        check_output(own.output, option="output", inputs=[own.prompt_file], overwrite=own.overwrite)
    chat_model = open_model(own, command="generate")  # before the file, so that a failure leaves no file
    source = own.prompt_file
    places = [f"{source}, line {prompt.line}," if source else "The prompt" for prompt in prompts]
    if own.output is None and len(prompts) == 1:
        return _answer_one(chat_model, prompts[0], places[0], own, sampling)
    tokens = chat_model.encode([prompt.messages for prompt in prompts], places)
    with _make_journal(prompts, own, sampling) as journal:
        return _answer_all(chat_model, prompts, tokens, own, sampling, journal=journal)


def _make_journal(prompts: list[Prompt], own: argparse.Namespace, sampling: Sampling) -> Journal:
    """Return the journal of the answers; a command with the same model, prompts and options continues it."""
    from crosstune.files.journal import Journal, file_stamps
    from crosstune.runs.trained_folder import find_trained

    trained = find_trained(own.model)
    names = ("model", "max_new_tokens", "backend", "precision")
    asked = {
        "options": {name: getattr(own, name) for name in names},
        "sampling": asdict(sampling),
        "prompts": [[list(prompt.messages), prompt.reference] for prompt in prompts],
        "files": file_stamps(trained.adapter, Path(trained.base).expanduser()),
    }
    return Journal(own.output, asked, say=Output().line, block=own.batch_size)


def _read_prompts(own: argparse.Namespace) -> list[Prompt]:
    from crosstune.results.prompt_file import make_prompt, read_prompts

    if own.prompt_file is not None:
        if own.prompt is not None:
            raise UserError("--prompt and --prompt_file cannot be combined.", do="remove one of them")
        return read_prompts(own.prompt_file, system=own.system, say=Output().line)
    text = own.prompt if own.prompt is not None else sys.stdin.read().strip()
    if not text:
        raise UserError("No prompt was given.", do='pass --prompt "..." or pipe text to standard input')
    return [make_prompt(text, system=own.system)]


def _answer_one(
    chat_model: ChatModel, prompt: Prompt, place: str, own: argparse.Namespace, sampling: Sampling
) -> int:
    """Print an answer while it is generated."""
    answer = chat_model.answer(
        prompt.messages,
        max_new_tokens=own.max_new_tokens,
        sampling=sampling,
        on_text=None if own.json else _show,
        place=place,
    )
    return print_result(prompt.row(answer), [""], as_json=own.json)


def _answer_all(
    chat_model: ChatModel,
    prompts: list[Prompt],
    tokens: list[tuple[int, ...]],
    own: argparse.Namespace,
    sampling: Sampling,
    *,
    journal: Journal,
) -> int:
    from crosstune.cli.terminal.screen import BarLine, LiveLine
    from crosstune.files.outputs import is_stream, open_stream, send, write_output
    from crosstune.results.prompt_file import json_line

    output, rows = Output(), journal.rows
    earlier = Counter(tokens[: len(rows)])
    line = LiveLine(output.console)
    # flush each answer to a pipe immediately
    stream = open_stream(own.output) if own.output is not None and is_stream(own.output) else None
    try:
        while (first := len(rows)) < len(prompts):
            batch, asked = prompts[first : first + own.batch_size], tokens[first : first + own.batch_size]
            if output.is_terminal:
                share = len(rows) / len(prompts)
                line.show(BarLine(title="answers", share=share, figures=[f"{len(rows)}/{len(prompts)}"]))
            answers = chat_model.continue_tokens(
                asked,
                max_new_tokens=own.max_new_tokens,
                sampling=sampling,
                earlier=earlier,
            )
            earlier.update(asked)
            journal.add(prompt.row(answer) for prompt, answer in zip(batch, answers, strict=True))
            if stream is not None:
                send(stream, b"".join(map(json_line, rows[-len(batch) :])), path=own.output)
            elif own.output is None and not own.json:
                for prompt, answer in zip(batch, answers, strict=True):
                    print_line(f"> {prompt.text or prompt.messages[-1]['content']}", style=QUIET)
                    print(answer, end="\n\n", flush=True)
    finally:
        line.clear()
        if stream is not None:
            stream.close()
    if own.output is None:
        return print_result({"answers": rows}, [], as_json=own.json)
    if stream is None:
        write_output(own.output, b"".join(map(json_line, rows)))
        journal.remove()
    if own.json and stream is None:
        return print_result({"output": str(own.output), "num_answers": len(rows)}, [], as_json=True)
    print_written(own.output, f"{len(rows)} answers")
    return EXIT_DONE


MODEL = "a run (folder or name), an adapter folder, or a model (see --model_name of train)"


def add_model_arguments(
    parser: Parser,
    *,
    metavar: str = "model",
    model: str = MODEL,
    temperature: float = 0.0,
    is_optional: bool = False,
) -> None:
    """Add the arguments that `open_model` and `read_sampling` read."""
    add = parser.add_argument
    if is_optional:
        add("model", type=read_run, help=f"{model}; with --server, one of its models", nargs="?")
    else:
        add("model", type=read_run, metavar=metavar, help=model)
    add("--system", default="", help="a system message")
    add("--max_new_tokens", type=at_least(1), default=256, help="longest answer in tokens (default 256)")
    add("--backend", default="auto", help="backend to run on (default auto)")
    add("--precision", default="auto", help="dtype to compute in (default auto)")
    add = parser.add_argument_group("sampling").add_argument
    greedy = "0: greedy decoding" + (f" (default {temperature:g})" if temperature else " (default)")
    add("--temperature", type=float, default=temperature, help=greedy)
    top_p = "sample from the likeliest tokens with this total probability"
    add("--top_p", type=float, default=1.0, help=top_p)
    add("--top_k", type=int, default=0, help="sample from the K likeliest tokens")
    min_p = "omit tokens below this fraction of the highest probability"
    add("--min_p", type=float, default=0.0, help=min_p)
    penalty = "above 1: make repeated tokens less likely"
    add("--repetition_penalty", type=float, default=1.0, help=penalty)
    add("--seed", type=int, default=0, help="sampling seed (default 0)")


def read_sampling(own: argparse.Namespace) -> Sampling:
    """Return the sampling settings; warn about settings without effect."""
    sampling = Sampling(**{field.name: getattr(own, field.name) for field in fields(Sampling)})
    if sampling.unused:
        names = ", ".join(f"--{name}" for name in sampling.unused)
        text = f"warning  {names} without effect at temperature 0; add --temperature 1"
        Output().line(text, style=WARNING)
    return sampling


def open_model(own: argparse.Namespace, *, command: str) -> ChatModel:
    """Open the model of the command line with a progress display."""
    if own.model is None:
        raise UserError("No model was specified.", do=f"crosstune {command} RUN, or {command} --server URL")
    announce_command(command, own.model, "importing the engine")
    from crosstune.cli.terminal.screen import Screen
    from crosstune.results.chat_model import open_chat_model

    with Screen(live=True) as screen:
        return open_chat_model(own.model, observer=screen, backend=own.backend, precision=own.precision)


def _show(text: str) -> None:
    print(text, end="", flush=True)


def make_parser_chat() -> Parser:
    parser = Parser(
        "chat", description="Chat with a model or a trained run.", epilog=CHAT_EXAMPLES, has_json=False
    )
    add_model_arguments(parser, is_optional=True)
    add = parser.add_argument_group("server").add_argument
    add("--server", metavar="URL", help="chat with an OpenAI-compatible server instead of a local model")
    add("--api_key", type=read_key, metavar="KEY", help="the server's key, if it needs one")
    return parser


def run_chat(words: Sequence[str]) -> int:
    own = make_parser_chat().parse_args(list(words))
    sampling = read_sampling(own)

    from crosstune.results.prompt_file import Conversation

    if own.server is None:
        own.model = own.model and read_run(own.model)
        chat_model: ChatModel | ServerModel = open_model(own, command="chat")
    else:
        chat_model = _connect(own)
    conversation = Conversation(system=own.system)
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401  (line editing and history for input())

        _say("/help lists the commands; Ctrl-C interrupts an answer, Ctrl-D quits.")
    while (line := _read_line(interactive)) is not None:
        try:
            if line.startswith("/") and not line.startswith("//"):
                if not _run_chat_command(line, conversation):
                    break
            elif line:
                _answer(chat_model, conversation, line.removeprefix("/"), own, sampling)
        except UserError as error:  # such as a chat template that rejects a system message
            print_error(error.lines())
    return EXIT_DONE


def _connect(own: argparse.Namespace) -> ServerModel:
    """Connect to the server of --server; warn about options without effect."""
    unused = [f"--{name}" for name in ("backend", "precision") if getattr(own, name) != "auto"]
    if unused:
        Output().line(f"warning  {' and '.join(unused)} without effect on a server", style=WARNING)
    from crosstune.files.openai_client import connect

    chat_model = connect(own.server, name=own.model, api_key=own.api_key or "")
    _say(f"{chat_model.name} on {chat_model.url}")
    return chat_model


def _answer(
    chat_model: ChatModel | ServerModel,
    conversation: Conversation,
    line: str,
    own: argparse.Namespace,
    sampling: Sampling,
) -> None:
    """Print the answer to a message and add both to the conversation."""
    try:
        answer = chat_model.answer(
            conversation.with_question(line),
            max_new_tokens=own.max_new_tokens,
            sampling=sampling,
            on_text=_show,
        )
    except KeyboardInterrupt:
        print(" ... (interrupted and discarded)")
    else:
        print()
        conversation.add(line, answer)


def _run_chat_command(line: str, conversation: Conversation) -> bool:
    """Run a chat command; return False to quit."""
    name, _, rest = line.partition(" ")
    rest = rest.strip()
    if name in ("/exit", "/quit"):
        return False
    if name == "/help":
        _say(f"{CHAT_HELP}\n{CHAT_NOTES}")
    elif name == "/reset":
        conversation.reset()
        _say("Conversation cleared.")
    elif name == "/system":
        conversation.system = rest
        _say("System message set." if rest else "System message removed.")
    elif name in ("/save", "/load"):
        if not rest:
            raise UserError(f"{name} needs a file name.", do=f"{name} chat.jsonl")
        path = Path(rest).expanduser()
        if name == "/save":
            conversation.save(path)
            _say(f"saved    {path}")
        else:
            conversation.load(path)
            _say(f"loaded   {path}, {len(conversation.turns)} messages")
    else:
        hint = did_you_mean(name, [command.split(" ")[0] for command in CHAT_COMMANDS])
        raise UserError(
            f"Unknown command {name}; nothing was sent to the model.",
            do=f"{hint}/help lists the commands; to send a message that starts with a slash, write two: /{name}",
        )
    return True


def _say(text: str) -> None:
    Output().line(text, style=QUIET)


def _read_line(interactive: bool) -> str | None:
    """Return the next line of input, or None at its end."""
    try:
        return input("> " if interactive else "").strip()
    except EOFError:
        return None
    except KeyboardInterrupt:  # clear the line, as in a shell
        print()
        return ""
