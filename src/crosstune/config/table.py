"""Format the options for --help and for the docs table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from crosstune.config.option import OnResume, Option, check_duration
from crosstune.config.option_names import names_of
from crosstune.config.schema import GROUPS, option_list
from crosstune.config.values import expectation

_TYPE_NAMES = {bool: "bool", int: "int", float: "number", str: "text"}


@dataclass(frozen=True, kw_only=True)
class Description:
    """Everything there is to know about one option."""

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
        rows = [
            ("takes", self.takes),
            ("default", self.default),
            ("has effect", self.has_effect),
            ("on resume", self.on_resume),
            ("environment", self.environment),
            ("also", ", ".join(f"--{name}" for name in self.other_names)),
            ("elsewhere", ", ".join(self.names_elsewhere)),
            ("example", self.example),
        ]
        head = [f"--{self.name}  ({self.group})", f"  {self.meaning}", ""]
        return head + [
            line for title, text in rows if text for line in _fill(f"  {title}", text, 110, indent=15)
        ]


def describe_option(option: Option) -> Description:
    """Return the description of an option for `crosstune options NAME`."""
    conditions = " and ".join(
        condition.summary.replace("`", "") for condition in option.needs if condition.summary
    )
    return Description(
        name=option.name,
        group=option.group,
        meaning=option.text,
        takes=expectation(option).removeprefix("it takes ") + (", or none" if option.optional else ""),
        default=_shown(option.default),
        has_effect=f"only with {conditions}" if conditions else "always",
        on_resume=_on_resume(option),
        environment=option.env or "",
        other_names=list(option.aliases),
        names_elsewhere=names_of(option),
        example=f"crosstune train --{option.name} {_example_value(option)}".rstrip(),
    )


def _on_resume(option: Option) -> str:
    if OnResume.ONE_START in option.on_resume:
        return "applies to one start; a run does not keep it"
    if OnResume.OWN_MACHINE in option.on_resume:
        return "chosen for each machine; not taken over from a checkpoint of another one"
    if OnResume.DIVIDES_DATA in option.on_resume:
        return "a change gives other data, which is refused unless --allow_mismatch data"
    if OnResume.ADAPTER in option.on_resume or OnResume.NEW_BLOCKS in option.on_resume:
        return "a change gives other weights to train, which is refused unless --allow_mismatch trainable"
    if OnResume.FREE in option.on_resume:
        return "may change; the training stays the same"
    return "a change is allowed and reported"


def _example_value(option: Option) -> str:
    if option.type is bool:
        return "false" if option.default else ""
    if option.choices:
        return next(
            (c for c in option.choices if c not in (option.default, "auto", "none")), option.choices[0]
        )
    if option.check is not None and option.joins_items is not None and option.default:
        return str(option.default)  # a list of a form of its own
    if isinstance(option.default, (int, float)) and option.default > 0:
        return _shown(option.default)
    if option.check is check_duration:
        return option.default or "3h30m"
    usual = {"allow_mismatch": "data", "resume": "auto", "dataset": "chats.jsonl"}
    return usual.get(option.name, {int: "100", float: "0.05", str: option.name.upper()}[option.type])


def help_text(*, width: int = 100, only: Sequence[str] | None = None, recipe: str = "") -> str:
    """Return the options by group, one or two lines each: all, those named, or those of a recipe."""
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
        lines += ["", f"These are the options of the recipe {recipe}. Others have options of their own:"]
        lines += [f"  crosstune train --recipe {name} --help" for name in others]
    return "\n".join(lines)


def markdown_table() -> str:
    """Return the reference page of all options."""
    lines = [
        "# Options",
        "",
        "Generated from the schema by `crosstune options --markdown`; edit the schema, not this page.",
        "Each option is a flag (`--name value`, dashes and underscores alike), a key of the YAML file given with",
        "`--config`, and a keyword of `crosstune.train`. A flag wins over the environment,",
        "the environment over the file, the file over the default. `plan` and `train` warn about an option that is set but",
        "has no effect.",
    ]
    for title in GROUPS:
        lines += ["", f"## {title}", "", "| option | takes | default | meaning |", "|---|---|---|---|"]
        for option in option_list():
            if option.group == title:
                lines.append(_markdown_row(option))
    return "\n".join(lines) + "\n"


def _markdown_row(option: Option) -> str:
    also = [f"`--{alias}`" for alias in option.aliases] + [f"`${option.env}`"] * bool(option.env)
    meaning = option.text + (f" (also {', '.join(also)})" if also else "")
    meaning += "".join(f"; {limit}" for limit in _limits(option))
    return f"| `--{option.name}` | {_takes(option)} | `{_shown(option.default)}` | {meaning} |"


def _recipe_of(option: Option) -> str:
    """Return the only recipe that has an option; an empty text for an option of all."""
    return next((condition.recipe for condition in option.needs if condition.recipe), "")


def _help_lines(option: Option, width: int, *, recipe: str = "") -> list[str]:
    head = f"  --{option.name} {_takes(option).upper() if option.choices is None else ''}".rstrip()
    details = [f"default {_shown(option.default)}"]
    if option.choices:
        details.append("one of " + ", ".join(option.choices))
    details += [f"also --{alias}" for alias in option.aliases]
    if option.env:
        details.append(f"environment {option.env}")
    details += [limit.replace("`", "").replace("**", "") for limit in _limits(option, recipe=recipe)]
    body = f"{option.text} ({'; '.join(details)})"
    return _fill(head, body, width)


def _limits(option: Option, *, recipe: str = "") -> list[str]:
    """Return when the option has an effect, for one recipe if it is named."""
    needs = [condition for condition in option.needs if not recipe or condition.recipe != recipe]
    conditions = [condition.summary for condition in needs if condition.summary]
    return [f"only with {' and '.join(conditions)}"] if conditions else []


def _fill(head: str, body: str, width: int, *, indent: int = 36) -> list[str]:
    import textwrap

    lines = textwrap.wrap(body, width - indent)
    first = head.ljust(indent) if len(head) < indent else head
    if len(head) >= indent:
        return [first, *(" " * indent + line for line in lines)]
    return [first + lines[0], *(" " * indent + line for line in lines[1:])]


def _takes(option: Option) -> str:
    if option.choices:
        return " ".join(f"`{choice}`" for choice in option.choices)
    return _TYPE_NAMES[option.type] + (" or auto" if option.auto is not None else "")


def _shown(value: Any) -> str:
    if value is None:
        return "unset"
    return (
        str(value).lower()
        if isinstance(value, bool)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )
