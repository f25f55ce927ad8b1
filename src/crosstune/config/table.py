"""Format the options for --help, for `crosstune options NAME` and for the options page."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from crosstune.config.option import OnResume, Option, check_duration
from crosstune.config.option_names import names_of
from crosstune.config.schema import GROUPS, option_list
from crosstune.config.values import accepted_values

_TYPE_NAMES = {bool: "bool", int: "int", float: "number", str: "text"}
_ON_RESUME = {
    OnResume.ONE_START: "applies to one start; a run does not record it",
    OnResume.OWN_MACHINE: "chosen per machine; a checkpoint from another machine does not set it",
    OnResume.DIVIDES_DATA: "a change gives other data, refused unless --allow_mismatch data",
    OnResume.ADAPTER: "a change gives other trained weights, refused unless --allow_mismatch trainable",
    OnResume.NEW_BLOCKS: "a change gives other trained weights, refused unless --allow_mismatch trainable",
    OnResume.FREE: "may change; the training stays the same",
}
"""Effect on resume -> its description; the first one that an option has counts."""
_PAGE_HEAD = """# Options

Generated from the schema by `crosstune options --markdown`; edit the schema, not this page.
Each option is a flag (`--name value`, with dashes or underscores), a key in the YAML file of `--config`, and a
keyword of `crosstune.train`. Flags override the environment, the environment overrides the file, the file overrides
the defaults. `plan` and `train` warn about options that are set but have no effect.
"""


def help_text(*, width: int = 100, only: Sequence[str] | None = None, recipe: str = "") -> str:
    """Return the options by group, a few lines each; with `only` these, with `recipe` without other recipes' options."""
    lines: list[str] = []
    listed = [o for o in option_list() if only is None or o.name in only]
    others = sorted({found for o in listed if (found := _recipe_of(o)) not in ("", recipe)} if recipe else ())
    for title in GROUPS:
        options = [o for o in listed if o.group == title and _recipe_of(o) not in others]
        if options:
            lines += ["", f"{title}:"]
        for option in options:
            lines += _help_lines(option, width, recipe=recipe)
    if others:
        lines += ["", f"These are the options of the recipe {recipe}. For the other recipes:"]
        lines += [f"  crosstune train --recipe {name} --help" for name in others]
    return "\n".join(lines)


def markdown_table() -> str:
    """Return the options page."""
    lines = [_PAGE_HEAD.rstrip()]
    for title in GROUPS:
        lines += ["", f"## {title}", "", "| option | value | default | meaning |", "|---|---|---|---|"]
        lines += [_markdown_row(option) for option in option_list() if option.group == title]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, kw_only=True)
class Description:
    """The full description of one option."""

    name: str
    group: str
    meaning: str
    takes: str
    default: str
    has_effect: str
    on_resume: str
    environment: str
    other_names: list[str]
    names_elsewhere: list[str]
    example: str

    def lines(self) -> list[str]:
        rows = {
            "values": self.takes,
            "default": self.default,
            "has effect": self.has_effect,
            "on resume": self.on_resume,
            "environment": self.environment,
            "also": ", ".join(f"--{name}" for name in self.other_names),
            "elsewhere": ", ".join(self.names_elsewhere),
            "example": self.example,
        }
        head = [f"--{self.name}  ({self.group})", f"  {self.meaning}", ""]
        return head + [
            line for title, text in rows.items() if text for line in _fill(f"  {title}", text, 110, indent=15)
        ]


def describe_option(option: Option) -> Description:
    """Return the description of an option for `crosstune options NAME`."""
    conditions = [condition.summary.replace("`", "") for condition in option.needs if condition.summary]
    effects = [text for effect, text in _ON_RESUME.items() if effect in option.on_resume]
    return Description(
        name=option.name,
        group=option.group,
        meaning=option.text,
        takes=accepted_values(option) + (", or none" if option.optional else ""),
        default=_shown(option.default),
        has_effect=f"only with {' and '.join(conditions)}" if conditions else "always",
        on_resume=effects[0] if effects else "a change is allowed and reported",
        environment=option.env or "",
        other_names=list(option.aliases),
        names_elsewhere=names_of(option),
        example=f"crosstune train --{option.name} {_example_value(option)}".rstrip(),
    )


def _example_value(option: Option) -> str:
    if option.type is bool:
        return "false" if option.default else ""
    if option.choices:
        return next(
            (c for c in option.choices if c not in (option.default, "auto", "none")), option.choices[0]
        )
    if option.check is not None and option.joins_items is not None and option.default:
        return str(option.default)  # a list with its own format
    if isinstance(option.default, (int, float)) and option.default > 0:
        return _shown(option.default)
    if option.check is check_duration:
        return option.default or "3h30m"
    usual = {"allow_mismatch": "data", "resume": "auto", "dataset": "chats.jsonl"}
    return usual.get(option.name, {int: "100", float: "0.05", str: option.name.upper()}[option.type])


def _markdown_row(option: Option) -> str:
    also = [f"`--{alias}`" for alias in option.aliases] + [f"`${option.env}`"] * bool(option.env)
    meaning = option.text + (f" (also {', '.join(also)})" if also else "")
    meaning += "".join(f"; {limit}" for limit in _limits(option))
    return f"| `--{option.name}` | {_values(option)} | `{_shown(option.default)}` | {meaning} |"


def _help_lines(option: Option, width: int, *, recipe: str = "") -> list[str]:
    head = f"  --{option.name} {_values(option).upper() if option.choices is None else ''}".rstrip()
    details = [f"default {_shown(option.default)}"]
    if option.choices:
        details.append("one of " + ", ".join(option.choices))
    details += [f"also --{alias}" for alias in option.aliases]
    if option.env:
        details.append(f"environment {option.env}")
    details += [limit.replace("`", "") for limit in _limits(option, recipe=recipe)]
    return _fill(head, f"{option.text} ({'; '.join(details)})", width, indent=36)


def _recipe_of(option: Option) -> str:
    """Return the recipe that an option belongs to; empty for an option of all recipes."""
    return next((condition.recipe for condition in option.needs if condition.recipe), "")


def _limits(option: Option, *, recipe: str = "") -> list[str]:
    """Return the conditions for an option to have an effect, for one recipe if it is named."""
    needs = [condition for condition in option.needs if not recipe or condition.recipe != recipe]
    conditions = [condition.summary for condition in needs if condition.summary]
    return [f"only with {' and '.join(conditions)}"] if conditions else []


def _fill(head: str, body: str, width: int, *, indent: int) -> list[str]:
    """Wrap `body` in a column next to `head`, or below it if the head is too long."""
    space = " " * indent
    if len(head) >= indent:
        return [head, *textwrap.wrap(body, width, initial_indent=space, subsequent_indent=space)]
    return textwrap.wrap(body, width, initial_indent=head.ljust(indent), subsequent_indent=space)


def _values(option: Option) -> str:
    if option.choices:
        return " ".join(f"`{choice}`" for choice in option.choices)
    return _TYPE_NAMES[option.type] + (" or auto" if option.auto is not None else "")


def _shown(value: Any) -> str:
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
