"""Run a subcommand, and turn its errors into messages and exit codes."""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Callable, Sequence

from crosstune.cli.errors import print_error
from crosstune.cli.escape_controls import escape_output, raw_stream
from crosstune.cli.fold import fold_help
from crosstune.cli.interrupts import end_quietly
from crosstune.cli.streams import lasting_output
from crosstune.cli.words import check_words
from crosstune.core.connected import end_at_once, is_connected
from crosstune.core.errors import EXIT_DONE, EXIT_OUR_FAULT, UserError
from crosstune.core.names import unknown_name
from crosstune.core.out_of_memory import OutOfMemory, memory_errors
from crosstune.core.user_paths import check_home

# Subcommand -> its one-line help. The code is in crosstune.cli.<name>, imported on use.
COMMANDS = {
    "train": "fine-tune a model",
    "launch": "start a training on several machines: SLURM, Kubernetes, Ray or ssh",
    "ladder": "try optimisations of a training one after the other, measure each, and keep what helps",
    "plan": "show what train would do, here or on another machine, without doing it",
    "judge": "train, test and use a model that scores or compares answers",
    "data": "check a data set: counts, lengths, and examples with the supervised part marked",
    "doctor": "check this machine: backends, memory, and a three-step training job on each backend",
    "generate": "answer a prompt with a model or a trained run",
    "chat": "chat with a model or a trained run",
    "latents": "build pairs of texts and sentence vectors; decode, encode, sample and evaluate with a latent-diffusion model",
    "merge": "merge a trained adapter into the weights of its base model",
    "export": "write a trained run or a model for other tools: Hugging Face, MLX, GGUF",
    "convert": "change how the weights of a model folder are quantized",
    "move": "pack a run into one archive to continue it on another machine or backend",
    "checkpoint": "list, verify, prune and export the checkpoints of a run",
    "report": "write the HTML page of a run",
    "runs": "list past and running runs with their figures",
    "compare": "show what differs between runs: options, results, curves",
    "adopt": "write entry files at the paths of guides, so that old commands keep working",
    "models": "list, download and remove models in the cache",
    "options": "list every option of train, or explain one",
    "completion": "print a script that completes commands and options in a shell",
}

HELP = """crosstune: train language models on whatever machine you have.

usage: crosstune COMMAND [options]

{commands}

examples:
  crosstune train                                     the bundled model on the bundled data, on the best backend here
  crosstune train --model_name ORG/MODEL --dataset chats.jsonl --train_type lora --num_epochs 2
  crosstune plan --machine apple-m1-16gb --train_type qlora
  crosstune generate runs/NAME --prompt "Turn off the attic fan in 20 minutes."

Run `crosstune COMMAND --help` for details. Exit codes: 0 success, 1 internal error, 2 the request has to be changed,
3 stopped by a signal or a time limit after saving a checkpoint, 130 stopped immediately."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, by default that of this process, and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None and isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # a caller's own stream may have been read from
    _print_any_character()
    escape_output()
    if argv is not None:
        return end_quietly(lambda: _lasting(words), is_process=False)
    return _end_connected(lambda: end_quietly(lambda: _lasting(words), is_process=True))


def _end_connected(run: Callable[[], int]) -> int:
    """Return the exit code of this process; end it here if it failed as one of several, see `end_at_once`."""
    try:
        code = run()
    except Exception:  # printed as always; only the way in which the process ends differs
        if not is_connected():
            raise
        sys.excepthook(*sys.exc_info())
        code = EXIT_OUR_FAULT
    if is_connected():
        end_at_once(code)
    return code


def _lasting(words: list[str]) -> int:
    """Run a command line; its output may end before it does."""
    try:
        with lasting_output():
            return _main(words)
    except UserError as error:
        print_error(error.lines())
        return error.exit_code


def _main(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        commands = "\n".join(f"  {name:<10} {text}" for name, text in COMMANDS.items())
        print(fold_help(HELP.format(commands=commands)))
        return EXIT_DONE
    if words[0] in ("-V", "--version"):
        from crosstune.core.version import __version__

        print(f"crosstune {__version__}")
        return EXIT_DONE
    return _run(words[0], words[1:])


def _run(command: str, words: list[str]) -> int:
    try:
        if command not in COMMANDS:
            raise unknown_name("command", command, COMMANDS)
        check_words(words)
        check_home(words)
        with memory_errors(doing=f"crosstune {command}"):
            return int(importlib.import_module(f"crosstune.cli.{command}").run(words))
    except UserError as error:
        print_error(error.lines())
        if isinstance(error, OutOfMemory):
            # Libraries that clean up when the process ends have no memory either, and would print tracebacks.
            sys.unraisablehook = lambda _: None
        return error.exit_code
    except OSError as error:
        if error.filename is None:
            raise
        # Whatever the system refuses about a file is for the user to mend: its name, its rights, its disk.
        refused = UserError(f"{error.filename} cannot be read or written.", why=f"{error.strerror}.")
        print_error(refused.lines())
        return refused.exit_code


def _print_any_character() -> None:
    """Escape what the terminal's encoding lacks, and bytes of file names that are not UTF-8, instead of failing."""
    for stream in (raw_stream(sys.stdout), raw_stream(sys.stderr)):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
