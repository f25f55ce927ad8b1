"""Format the options for --help and for the docs table."""

from __future__ import annotations

from typing import Any

from crosstune.config.option import Option
from crosstune.config.schema import GROUPS, option_list

_TYPE_NAMES = {bool: "bool", int: "int", float: "number", str: "text"}


def help_text(*, width: int = 100) -> str:
    """Return every option by group, one or two lines each."""
    lines: list[str] = []
    for title in GROUPS:
        lines += ["", f"{title}:"]
        for option in option_list():
            if option.group == title:
                lines += _help_lines(option, width)
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
        "has no effect; `train` stops with an error for what is marked as not built yet.",
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


def _help_lines(option: Option, width: int) -> list[str]:
    head = f"  --{option.name} {_takes(option).upper() if option.choices is None else ''}".rstrip()
    details = [f"default {_shown(option.default)}"]
    if option.choices:
        details.append("one of " + ", ".join(option.choices))
    details += [f"also --{alias}" for alias in option.aliases]
    if option.env:
        details.append(f"environment {option.env}")
    details += [limit.replace("`", "").replace("**", "") for limit in _limits(option)]
    body = f"{option.text} ({'; '.join(details)})"
    return _fill(head, body, width)


def _limits(option: Option) -> list[str]:
    """Return when the option has an effect, and which part of it is not built yet."""
    conditions = [condition.summary for condition in option.needs if condition.summary]
    limits = [f"only with {' and '.join(conditions)}"] if conditions else []
    return limits + ([f"**not built yet**: {option.unbuilt.summary}"] if option.unbuilt is not None else [])


def _fill(head: str, body: str, width: int) -> list[str]:
    import textwrap

    indent = 36
    lines = textwrap.wrap(body, width - indent)
    first = head.ljust(indent) if len(head) < indent else head
    if len(head) >= indent:
        return [first, *(" " * indent + line for line in lines)]
    return [first + lines[0], *(" " * indent + line for line in lines[1:])]


def _takes(option: Option) -> str:
    if option.choices:
        return " ".join(f"`{choice}`" for choice in option.choices)
    return _TYPE_NAMES[option.type]


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
