"""`crosstune options` and `completion`: list or explain options, and print a script that completes them in a shell."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from crosstune.cli.arguments import (
    Parser,
    print_json,
    print_result,
    read_path,
    read_path_or_name,
    read_run,
    read_run_path,
)
from crosstune.config.option import StringKind
from crosstune.config.option_names import suggestions
from crosstune.config.peer_names import SAME_FOR_VALUES, peer_names
from crosstune.config.schema import option_list, options_by_name
from crosstune.config.table import describe_option, description_lines, help_text, markdown_table
from crosstune.core.errors import EXIT_DONE, UserError, shown

EXAMPLES = """examples:
  crosstune options                    every option
  crosstune options lora_rank          one option in full
  crosstune options lora               the options with lora in their name
  crosstune options load_in_4bit       the equivalent of another trainer's option"""


def make_parser() -> Parser:
    parser = Parser(
        "options", description="List the options of train and plan, or explain one.", epilog=EXAMPLES
    )
    parser.add_argument("name", nargs="?", help="an option, or part of a name")
    parser.add_argument("--markdown", action="store_true", help="print the page docs/reference/options.md")
    return parser


def run(words: Sequence[str]) -> int:
    parser = make_parser()
    flags = [action for known in parser._actions for action in known.option_strings]
    # Accept --lora_rank for lora_rank.
    own = parser.parse_args([word if word in flags else word.lstrip("-") for word in words])
    if own.json and own.name is None:
        parser.error("--json needs the name of an option")
    if own.markdown:
        print(markdown_table(), end="")
    elif own.name is None:
        print(help_text())
    else:
        _print_named(own.name, as_json=own.json)
    return EXIT_DONE


def _print_named(asked: str, *, as_json: bool) -> None:
    name = asked.replace("-", "_").lower()
    peers = peer_names()
    other = peers.same.get(name) or SAME_FOR_VALUES.get(name, ("",))[0]
    option = options_by_name().get(name) or options_by_name().get(other)
    if option is not None:
        facts = describe_option(option)
        print_result(facts, description_lines(facts), as_json=as_json)
        return
    if name in peers.different:
        raise UserError(f"crosstune has no option {name}.", do=f"instead: {peers.different[name]}")
    found = [o for o in option_list() if name and any(name in known for known in (o.name, *o.aliases))]
    if not found:
        close = suggestions(name)
        do = f"did you mean {' or '.join(close)}?" if close else "see: crosstune options"
        raise UserError(f"No option name contains {shown(asked)}.", do=do)
    if as_json:
        print_json([describe_option(option) for option in found])
    else:
        print(help_text(only=[option.name for option in found]).strip("\n"))


SHELLS = ("bash", "zsh", "tcsh")
TAKE_OPTIONS = ("train", "launch", "plan", "data", "judge")
"""Commands that accept the options of a run."""
INSTALL = """to install it:
  bash   crosstune completion bash > ~/.local/share/bash-completion/completions/crosstune
  zsh    crosstune completion zsh > ~/.zfunc/_crosstune, with `fpath+=~/.zfunc; autoload -Uz compinit; compinit` in ~/.zshrc
  tcsh   crosstune completion tcsh > ~/.crosstune.tcsh, with `source ~/.crosstune.tcsh` in ~/.tcshrc

Create the folder first if necessary, and open a new shell afterwards. To try it in the current bash:
  eval "$(crosstune completion bash)" """


def make_parser_completion() -> Parser:
    parser = Parser(
        "completion",
        description="Print a script that completes commands, options, their values and file names in a shell.",
        epilog=INSTALL,
        has_json=False,
    )
    parser.add_argument("shell", choices=SHELLS)
    return parser


def run_completion(words: Sequence[str]) -> int:
    own = make_parser_completion().parse_args(list(words))

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
