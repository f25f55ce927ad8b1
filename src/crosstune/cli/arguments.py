"""Parse the arguments of a subcommand, and print its result as text or JSON."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from crosstune.cli.terminal.streams import fold_help
from crosstune.config.load import load_config
from crosstune.config.schema import Config, options_by_name
from crosstune.config.values import wrong_path
from crosstune.core.errors import EXIT_DONE, UserError, shown
from crosstune.core.names import did_you_mean, unknown_name
from crosstune.files.paths import named_run


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises UserError instead of exiting, and accepts no abbreviations."""

    def __init__(self, command: str, *, description: str, epilog: str = "", has_json: bool = True) -> None:
        super().__init__(
            prog=f"crosstune {command}",
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if has_json:
            self.add_argument("--json", action="store_true", help="print the result as JSON")

    def format_help(self) -> str:
        return fold_help(super().format_help())

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.refuse_unknown(unknown)
        return found

    def refuse_unknown(self, words: Sequence[str]) -> NoReturn:
        """Raise a UserError for unknown arguments."""
        word = next((word for word in words if word.startswith("-")), words[0])
        flags = [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]
        do = f"{did_you_mean(word.partition('=')[0], flags)}See: {self.prog} --help"
        raise UserError(f"Unrecognized argument {shown(word)}.", do=do)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            name = argparse._get_action_name(action) or "argument"
            names = [str(choice) for choice in action.choices]
            wrong = unknown_name(name, str(value), names)
            raise UserError(wrong.message, do=f"{wrong.do} See: {self.prog} --help")

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message[:1].upper()}{message[1:]}.", do=f"see: {self.prog} --help")


class ActionParser(Parser):
    """A parser of a command with actions. It rejects options of other actions."""

    def __init__(self, command: str, actions: Mapping[str, str], *, description: str, epilog: str) -> None:
        summary = "\n".join(f"  {name:<8} {text}" for name, text in actions.items())
        super().__init__(command, description=f"{description}\n\n{summary}", epilog=epilog)
        self.actions_of: dict[str, tuple[str, ...]] = {}
        self.names, self.command = tuple(actions), f"  crosstune {command} "
        self.add_argument("action", choices=self.names)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        asked = [word for word in args or () if word in self.names]
        if asked and {"-h", "--help"} & {*args}:
            self._show_only(asked[0])
        return super().parse_args(args, namespace)

    def _show_only(self, action: str) -> None:
        """Hide the options and examples of other actions in the help text."""
        for each in self._actions:
            if action not in self.actions_of.get(each.dest, (action,)):
                each.help = argparse.SUPPRESS
        others = tuple(f"{self.command}{name} " for name in self.names if name != action)
        lines = (self.epilog or "").splitlines()
        self.epilog = "\n".join(line for line in lines if not line.startswith(others))

    def add_for(self, actions: str, flag: str, *, help: str, **settings: Any) -> None:
        """Add an option for the given actions (a space-separated list)."""
        names = tuple(actions.split())
        self.actions_of[flag.removeprefix("--")] = names
        default = settings.get("default")
        shown = f" (default {default})" if default not in (None, -1, False) else ""
        self.add_argument(flag, help=f"for {', '.join(names)}: {help}{shown}", **settings)

    def refuse_others(self, own: argparse.Namespace) -> None:
        """Raise a UserError for an option of a different action."""
        for name, actions in self.actions_of.items():
            if own.action not in actions and getattr(own, name) != self.get_default(name):
                self.error(f"--{name} is for {', '.join(actions)}; {own.action} does not accept it")


def parse_config(parser: Parser, words: Sequence[str]) -> tuple[argparse.Namespace, Config]:
    """Return the subcommand's own arguments, and the configuration from the rest."""
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
    """Argparse type for a path."""
    return Path(read_path_or_name(text)).expanduser()


def read_path_or_name(text: str) -> str:
    """Argparse type for a path or a name, such as a model name."""
    wrong = "pass a value" if not text.strip() else wrong_path(text)
    if wrong is not None:
        raise argparse.ArgumentTypeError(f"it cannot be {shown(text)}: {wrong}")
    return text


def read_key(text: str) -> str:
    """Argparse type of an API key, which errors do not repeat."""
    if not text or any(char.isspace() or not char.isprintable() for char in text):
        raise argparse.ArgumentTypeError("a key is one word of printable characters")
    return text


def read_run(text: str) -> str:
    """Argparse type for a run: its path, or its name in the default runs folder. A path or a bundled model comes first."""
    from crosstune.models.bundled import BUNDLED

    return text if text in BUNDLED else named_run(read_path_or_name(text))


def read_run_path(text: str) -> Path:
    """Argparse type for a local run: its path, or the path that belongs to its name."""
    return read_path(read_run(text))


def at_least(low: int | float, *, high: int = 2**63 - 1) -> Callable[[str], int | float]:
    """Return an argparse type: a number of the type of `low`, from `low` to `high`."""

    def read(text: str) -> int | float:
        kind = "an integer" if isinstance(low, int) else "a number"
        with contextlib.suppress(ValueError):
            if low <= (value := type(low)(text)) <= high:
                return value
            if value > high:
                most = f"; the maximum is {high:,}" if high < 2**63 - 1 else ""
                raise argparse.ArgumentTypeError(f"{shown(text)} is too large{most}")
        raise argparse.ArgumentTypeError(f"{shown(text)} is not {kind} of at least {low:g}")

    return read


Line: TypeAlias = str | tuple[str, str | None]
"""A line, or a line and its style."""


def print_result(data: object, lines: Iterable[Line], *, as_json: bool) -> int:
    """Print the result of a command as JSON or as lines, and return the exit code."""
    if as_json:
        print_json(data)
        return EXIT_DONE
    from crosstune.cli.terminal.output import print_line

    for line in lines:
        text, style = (line, None) if isinstance(line, str) else line
        print_line(text, style=style)
    return EXIT_DONE


def print_written(path: Path, what: str) -> None:
    """Print the path of a written file; on standard error if standard output may be that file."""
    from crosstune.cli.terminal.output import Output
    from crosstune.files.outputs import is_stream

    Output(sys.stderr if is_stream(path) else sys.stdout).line(f"written  {path} ({what})")


def announce_command(command: str, *work: str | None) -> None:
    """Announce the first steps of a command on standard error, before the slow import of an engine."""
    from crosstune.cli.terminal.output import QUIET, Output

    output = Output()
    output.line(f"{command}: {', '.join(word for word in work if word)} ...", style=QUIET)
    output.drain()


def print_json(data: object) -> None:
    """Print data as JSON, non-finite numbers as null."""
    from crosstune.files.json_files import to_json

    print(to_json(data, indent=2))
