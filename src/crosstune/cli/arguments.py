"""Parse the arguments of a subcommand, and print its result as JSON."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from crosstune.cli.terminal.streams import fold_help
from crosstune.config.load import load_config
from crosstune.config.schema import Config, options_by_name
from crosstune.config.values import wrong_path
from crosstune.core.errors import EXIT_DONE, UserError, shown
from crosstune.core.names import nearest, unknown_name


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises UserError instead of exiting, and accepts no abbreviations."""

    def __init__(
        self,
        command: str,
        *,
        description: str,
        epilog: str = "",
        json: str | None = "print the result as JSON",
    ) -> None:
        """`json` is the help of --json; None for a command without it."""
        super().__init__(
            prog=f"crosstune {command}",
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if json is not None:
            self.add_argument("--json", action="store_true", help=json)

    def format_help(self) -> str:
        return fold_help(super().format_help())

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.refuse_unknown(unknown)
        return found

    def refuse_unknown(self, words: Sequence[str]) -> NoReturn:
        """Raise the error for arguments that the command does not have."""
        word = next((word for word in words if word.startswith("-")), words[0])
        flags = [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]
        close = nearest(word.partition("=")[0].replace("-", "_"), [flag.replace("-", "_") for flag in flags])
        hint = (
            f"did you mean {' or '.join(match.replace('__', '--', 1) for match in close)}? " if close else ""
        )
        raise UserError(
            f"{self.prog}: unrecognized argument {shown(word)}.", do=f"{hint}See: {self.prog} --help"
        )

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            name = argparse._get_action_name(action) or "argument"
            names = [str(choice) for choice in action.choices]
            wrong = unknown_name(name, str(value), names)
            raise UserError(f"{self.prog}: {wrong.message}", do=f"{wrong.do} See: {self.prog} --help")

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.prog}: {message}", do=f"see: {self.prog} --help")


def parse_config(parser: Parser, words: Sequence[str]) -> tuple[argparse.Namespace, Config]:
    """Return the subcommand's own arguments, and the run configuration made from the remaining ones."""
    parser.add_argument("--config", type=read_path, metavar="FILE", help="YAML file with options")
    if "-h" in words or "--help" in words:
        from crosstune.config.table import help_text

        named = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        named.add_argument("--recipe", default="sft")
        recipe, recipes = named.parse_known_args(list(words))[0].recipe, options_by_name()["recipe"].choices
        if recipe not in (recipes or ()):
            raise unknown_name("recipe", recipe, recipes or ())
        parser.print_help()
        print(help_text(recipe=recipe))
        sys.exit(0)
    own, flags = parser.parse_known_args(list(words))
    return own, load_config(flags, file=own.config)


def read_path(text: str) -> Path:
    """Return a path, as an argparse type; refuse what cannot be one."""
    return Path(read_path_or_name(text)).expanduser()


def read_path_or_name(text: str) -> str:
    """Return a path, or a name such as that of a model, as an argparse type; refuse what cannot be a path."""
    wrong = "give it a value" if not text.strip() else wrong_path(text)
    if wrong is not None:
        raise argparse.ArgumentTypeError(f"it cannot be {shown(text)}: {wrong}")
    return text


def at_least(low: int | float) -> Callable[[str], int | float]:
    """Return an argparse type: a number of the type of `low` that is at least `low` and fits into 63 bits."""

    def read(text: str) -> int | float:
        kind = "an integer" if isinstance(low, int) else "a number"
        try:
            value = type(low)(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{shown(text)} is not {kind} of at least {low:g}") from None
        if value >= 2**63:
            raise argparse.ArgumentTypeError(f"{shown(text)} is too large")
        if not low <= value:
            raise argparse.ArgumentTypeError(f"{shown(text)} is not {kind} of at least {low:g}")
        return value

    return read


Line: TypeAlias = str | tuple[str, str | None]
"""A line to print, or a line and its style."""


def print_result(data: object, lines: Iterable[Line], *, as_json: bool) -> int:
    """Print the result of a command, as JSON or as lines, and return its exit code."""
    if as_json:
        print_json(data)
        return EXIT_DONE
    from crosstune.cli.terminal.output import print_line

    for line in lines:
        text, style = (line, None) if isinstance(line, str) else line
        print_line(text, style=style)
    return EXIT_DONE


def print_json(data: object) -> None:
    """Print data as JSON, with null for non-finite numbers."""
    from crosstune.files.json_files import to_json

    print(to_json(data, indent=2))
