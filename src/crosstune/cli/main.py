"""The command line: finds the subcommand, runs it, turns errors into sentences and exit codes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from crosstune.core.errors import EXIT_AT_ONCE, EXIT_DONE, EXIT_USER_MUST_ACT, UserError
from crosstune.core.names import unknown_name

# Subcommand -> what it is for. Its code is crosstune.cli.<name>, imported when it is asked for.
COMMANDS = {
    "train": "fine-tune a model",
    "plan": "show what train would do, here or on another machine, without doing it",
    "data": "check a data set: counts, lengths, and examples with what is learned from them marked",
    "doctor": "check this machine: backends, memory, and a real three-step training job on each",
    "generate": "answer a prompt with a model or a trained run",
    "chat": "talk to a model or a trained run",
    "merge": "fold a trained adapter into the weights of its base",
    "export": "write a trained run or a model for other tools: Hugging Face, MLX, GGUF",
    "convert": "change how the weights of a model folder are quantized",
    "move": "take a run along to another machine or backend, in one archive",
    "checkpoint": "list, check, thin out and export the checkpoints of a run",
    "report": "write the HTML report of a run",
    "models": "list, fetch and remove models in the cache",
    "options": "list every option of train",
}

HELP = """crosstune: train language models on whatever machine you have.

usage: crosstune COMMAND [options]

{commands}

examples:
  crosstune train                                     the bundled model on the bundled data, on the best backend here
  crosstune train --model_name ORG/MODEL --dataset chats.jsonl --train_type lora --num_epochs 2
  crosstune plan --machine apple-m1-16gb --train_type qlora
  crosstune generate runs/NAME --prompt "Turn off the attic fan in 20 minutes."

`crosstune COMMAND --help` says more. Exit codes: 0 done, 1 a fault of crosstune, 2 something to change in the
request, 3 stopped by a signal or a time limit with a checkpoint kept, 130 stopped at once."""


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(HELP.format(commands="\n".join(f"  {name:<10} {text}" for name, text in COMMANDS.items())))
        return EXIT_DONE
    if words[0] in ("-V", "--version"):
        from crosstune import __version__

        print(f"crosstune {__version__}")
        return EXIT_DONE
    return _run(words[0], words[1:])


def _run(command: str, words: list[str]) -> int:
    try:
        if command not in COMMANDS:
            raise unknown_name("command", command, COMMANDS)
        return int(importlib.import_module(f"crosstune.cli.{command}").run(words))
    except UserError as error:
        for line in error.lines():
            print(line if line.startswith("  ") else f"crosstune: {line}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("\ncrosstune: stopped at once.", file=sys.stderr)
        return EXIT_AT_ONCE
    except BrokenPipeError:
        # The reader of our output went away (`crosstune ... | head`); nothing is left to tell it.
        sys.stderr.close()
        return EXIT_USER_MUST_ACT
