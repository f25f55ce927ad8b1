"""`crosstune completion`: print a script that completes commands, options and their values in a shell."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from crosstune.cli.arguments import Parser, read_path, read_path_or_name, read_run, read_run_path
from crosstune.config.option import StringKind
from crosstune.config.schema import option_list
from crosstune.core.errors import EXIT_DONE

SHELLS = ("bash", "zsh", "tcsh")
TAKE_OPTIONS = ("train", "launch", "plan", "data", "judge")
"""Commands that accept the options of a run."""
INSTALL = """to install it:
  bash   crosstune completion bash > ~/.local/share/bash-completion/completions/crosstune
  zsh    crosstune completion zsh > ~/.zfunc/_crosstune, with `fpath+=~/.zfunc; autoload -Uz compinit; compinit` in ~/.zshrc
  tcsh   crosstune completion tcsh > ~/.crosstune.tcsh, with `source ~/.crosstune.tcsh` in ~/.tcshrc

Create the folder first if necessary, and open a new shell afterwards. To try it in the current bash:
  eval "$(crosstune completion bash)" """


def make_parser() -> Parser:
    parser = Parser(
        "completion",
        description="Print a script that completes commands, options, their values and file names in a shell.",
        epilog=INSTALL,
        has_json=False,
    )
    parser.add_argument("shell", choices=SHELLS)
    return parser


def run(words: Sequence[str]) -> int:
    own = make_parser().parse_args(list(words))

    import shtab

    print(shtab.complete(full_parser(), shell=own.shell))
    return EXIT_DONE


def full_parser() -> argparse.ArgumentParser:
    """Return one parser with all commands."""
    from crosstune.cli.main import COMMANDS, load_command

    whole = argparse.ArgumentParser(prog="crosstune")
    whole.add_argument("--version", action="store_true", help="print the version")
    commands = whole.add_subparsers(parser_class=argparse.ArgumentParser)
    for name, text in COMMANDS.items():
        made = load_command(name, "make_parser")()
        command = commands.add_parser(name, help=text, parents=[made], add_help=False)
        if name in TAKE_OPTIONS:
            _add_options(command)
        for action in command._actions:
            _complete(action, command=name)
    return whole


def _add_options(command: argparse.ArgumentParser) -> None:
    """Add the options of a run that the command does not declare itself."""
    own = {name for action in command._actions for name in action.option_strings}
    if "--config" not in own:
        command.add_argument("--config", type=read_path, help="YAML file with options")
    for option in option_list():
        names = [f"--{name}" for name in (option.name, *option.aliases)]
        if own.intersection(names):
            continue
        command.add_argument(
            *names,
            choices=("true", "false") if option.type is bool else option.choices,
            nargs="?" if option.type is bool else None,
            type=read_path if option.holds is StringKind.PATH else str,
            help=option.text.split("; ")[0].replace("%", "%%"),
        )


def _complete(action: argparse.Action, *, command: str) -> None:
    """Complete file names for paths, and option names for `crosstune options`."""
    import shtab

    if action.type in (read_path, read_path_or_name, read_run, read_run_path):
        action.complete = shtab.FILE  # type: ignore[attr-defined]
    elif command == "options" and action.dest == "name":
        action.choices = [option.name for option in option_list()]
