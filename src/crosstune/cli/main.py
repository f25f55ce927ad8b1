"""Run a subcommand, and turn its errors into messages and exit codes."""

from __future__ import annotations

import gc
import importlib
import io
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from crosstune.cli.terminal.streams import drain_output, fold_help, wrap_output
from crosstune.core.errors import (
    END_WITH_BACKSLASH,
    EXIT_AT_ONCE,
    EXIT_DONE,
    EXIT_OUR_FAULT,
    UserError,
    follows_backslash,
    shown,
)
from crosstune.core.names import unknown_name
from crosstune.core.out_of_memory import OutOfMemory, memory_errors
from crosstune.files.plain_files import disk_full_reason, room_advice
from crosstune.process.this_process import end_at_once, may_hang

COMMANDS = {
    "train": "fine-tune a model",
    "launch": "start a multi-node run: SLURM, Kubernetes, Ray or ssh",
    "ladder": "try optimizations of a run one by one, measure each, and keep the changes that help",
    "sweep": "run trials with different values of options, and find the best",
    "plan": "show what train would do, on this machine or another, without doing it",
    "judge": "train, test and use a model that scores or compares answers",
    "pairs": "make preference pairs from a model's answers with a judge, and check pairs",
    "data": "check a dataset: counts, lengths, and examples with the supervised part marked",
    "doctor": "check this machine: backends, memory, and a three-step run on each backend",
    "generate": "answer a prompt with a model or a trained run",
    "chat": "chat with a model, a trained run or a server",
    "serve": "serve a run or a model over the OpenAI protocol",
    "eval": "run standard benchmarks on a run and its base model, side by side",
    "latents": "build text-vector pairs; decode, encode, sample and evaluate with a latent-diffusion model",
    "merge": "merge a trained adapter into the weights of its base model",
    "export": "export a trained run or a model for other tools: Hugging Face, MLX, GGUF",
    "push": "publish a run on the Hugging Face hub, with a model card",
    "convert": "change how the weights of a model folder are quantized",
    "move": "pack a run into one archive to continue it on another machine or backend",
    "checkpoint": "list, verify, prune and export the checkpoints of a run",
    "report": "write the HTML page of a run",
    "ui": "open a page to see runs live, start, stop and compare them, and chat",
    "runs": "list runs with their status and metrics",
    "compare": "compare the options, results and curves of runs",
    "import": "turn a configuration of axolotl, LLaMA-Factory, TRL, Unsloth, mlx-lm or torchtune into YAML",
    "adopt": "write entry scripts at the original paths, so that old commands keep working",
    "models": "list, download and remove models in the cache",
    "options": "list every option of train, or explain one",
    "completion": "print a script that completes commands and options in a shell",
}
"""Subcommand -> one-line help. `load_command` imports its code on use."""
_PACKAGE = "crosstune.cli.commands"
_FAMILIES = {
    "merge": "results",
    "export": "results",
    "convert": "results",
    "compare": "runs",
    "report": "runs",
    "chat": "generate",
    "import": "import_config",
    "completion": "options",
    "move": "checkpoint",
    "adopt": "crosstune.cli.adopt",  # the files it writes import it from there
}
"""Subcommand -> module, if not _PACKAGE.NAME."""

HELP = """crosstune: train language models on any machine.

usage: crosstune COMMAND [options]

{commands}

examples:
  crosstune train                                     the bundled model on the bundled data, on the best available backend
  crosstune train --model_name ORG/MODEL --dataset chats.jsonl --train_type lora --num_epochs 2
  crosstune plan --machine apple-m1-16gb --train_type qlora
  crosstune generate runs/NAME --prompt "Turn off the attic fan in 20 minutes."

Run `crosstune COMMAND --help` for details. Exit codes: 0 success, 1 internal error, 2 invalid request, 3 stopped
by a signal or a time limit after saving a checkpoint. Before the first step there is nothing to save: 130 stopped by
Ctrl-C, 143 terminated by SIGTERM; 130 also after a second Ctrl-C."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, by default this process's, and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    wrap_output()
    if argv is not None:
        return run_interruptible(lambda: _run_and_drain(words), is_process=False)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    try:
        code = run_interruptible(lambda: _run_and_drain(words), is_process=True)
    except Exception:  # printed as usual, but a process that may hang exits at once
        if not may_hang():
            raise
        sys.excepthook(*sys.exc_info())
        code = EXIT_OUR_FAULT
    if may_hang():
        end_at_once(code)
    gc.freeze()  # Python's shutdown searches for garbage: more than a second with torch imported
    return code


class _Interrupts:
    """The handler of Ctrl-C: raise KeyboardInterrupt until `ignored` is set.

    Python may raise it during any call, even the call that would ignore the signal, but not during an assignment.
    """

    ignored = False

    def __call__(self, number: int, frame: object) -> None:
        if not self.ignored:
            raise KeyboardInterrupt


def run_interruptible(run: Callable[[], int], *, is_process: bool) -> int:
    """Return the exit code of `run`, or 130 after Ctrl-C. Ignore further Ctrl-C; with `is_process`, until the process exits."""
    before, interrupts = signal.getsignal(signal.SIGINT), _Interrupts()
    if before is signal.default_int_handler or (is_process and callable(before)):
        _handle_interrupts(interrupts)
    try:
        try:
            return run()
        finally:
            interrupts.ignored = True
    except KeyboardInterrupt:
        return _stopped()
    except Exception as error:
        if not _comes_from_ctrl_c(error):
            raise
        return _stopped()
    finally:
        _handle_interrupts(signal.SIG_IGN if is_process else before)


def _comes_from_ctrl_c(error: BaseException | None) -> bool:
    """Return True if an error was caused by Ctrl-C: imports of native extensions turn it into other errors."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        error = error.__cause__ or error.__context__
    return any(isinstance(link, KeyboardInterrupt) for link in seen)


def _stopped() -> int:
    print("\ncrosstune: stopped.", file=sys.stderr)
    return EXIT_AT_ONCE


def _handle_interrupts(handler: Any) -> None:
    if handler is None or threading.current_thread() is not threading.main_thread():
        return  # the handler was not set in Python, or Python does not set one in this thread
    if handler is signal.SIG_IGN and hasattr(signal, "pthread_sigmask"):
        # Python prints an error for a signal that arrives just before it is ignored.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    signal.signal(signal.SIGINT, handler)


def _run_and_drain(words: list[str]) -> int:
    try:
        try:
            return _main(words)
        finally:
            drain_output()
    except UserError as error:
        return _report(error)


def _main(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        commands = "\n".join(f"  {name:<10} {text}" for name, text in COMMANDS.items())
        print(fold_help(HELP.format(commands=commands)))
        return EXIT_DONE
    if words[0] in ("-V", "--version"):
        from crosstune.core import __version__

        print(f"crosstune {__version__}")
        return EXIT_DONE
    return _run(words[0], words[1:])


def _run(command: str, words: list[str]) -> int:
    try:
        if command not in COMMANDS:
            raise _unknown_command(command)
        check_arguments(words)
        with memory_errors(doing=f"crosstune {command}"):
            return int(load_command(command, "run")(words))
    except UserError as error:
        if isinstance(error, OutOfMemory):
            # Libraries that clean up at exit also run out of memory and would print tracebacks.
            sys.unraisablehook = lambda _: None
        return _report(error)
    except Exception as error:
        if (full := disk_full_reason(error)) is not None:
            return _report(
                UserError(
                    f"crosstune {command} cannot write its files.",
                    why=f"the system reports {full!r}.",
                    do=room_advice(full, "use a different disk"),
                )
            )
        if not isinstance(error, OSError) or error.filename is None:
            raise
        # The user can fix a file error: its name, its permissions, its disk.
        return _report(
            UserError(
                f"{error.filename} cannot be read or written.",
                why=f"{error.strerror}.",
                do="check that its folder exists and that you have access",
            )
        )


def _unknown_command(command: str) -> UserError:
    from crosstune.config.schema import options_by_name

    recipe = options_by_name()["recipe"]
    asked = f"--recipe {command}" if command in (recipe.choices or ()) else recipe.instead.get(command)
    if asked is None:
        return unknown_name("command", command, COMMANDS)
    return UserError(f"Unknown command {shown(command)}.", do=f"did you mean crosstune train {asked}?")


def load_command(command: str, name: str) -> Callable[..., Any]:
    """Return the function `run` or `make_parser` of a subcommand; `run_COMMAND` in a module with several commands."""
    place = _FAMILIES.get(command, command)
    module = importlib.import_module(place if "." in place else f"{_PACKAGE}.{place}")
    function: Callable[..., Any] = getattr(module, f"{name}_{command}", None) or getattr(module, name)
    return function


def _report(error: UserError) -> int:
    from crosstune.cli.terminal.output import print_error

    print_error(error.lines())
    return error.exit_code


def check_arguments(words: Sequence[str]) -> None:
    """Raise a UserError for an argument that is not UTF-8, contains a NUL character, or follows a backslash by mistake."""
    for place, word in enumerate(words):
        if "\0" in word or any(0xD800 <= ord(char) <= 0xDFFF for char in word):
            raise UserError(
                f"An argument cannot be read: {shown(' '.join(words[max(0, place - 1) : place + 1]))}.",
                why="it contains a NUL character or is not UTF-8 text.",
                do="if it is a file name, rename the file",
            )
        if place and follows_backslash(word) and not words[place - 1].startswith("--"):  # values may be blank
            raise UserError(f"Unexpected argument {shown(word)}.", do=END_WITH_BACKSLASH)
