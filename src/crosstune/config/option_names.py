"""Find an option by name, alias or another trainer's name; suggest similar names for an unknown one."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

from crosstune.config.option import Option
from crosstune.config.peer_names import SAME_FOR_VALUES, SAME_VALUES, peer_names
from crosstune.config.schema import options_by_name
from crosstune.core.errors import UserError, shown

_NEGATIONS = {"no", "not", "skip", "without", "disable", "un"}


@dataclass(frozen=True)
class NamedOption:
    """An option and the name it was found by."""

    option: Option
    name: str
    is_peers: bool = False
    """True for another trainer's name."""

    @property
    def is_switch(self) -> bool:
        """True if a flag of this name needs no value."""
        if self.name in SAME_FOR_VALUES:
            return "true" in SAME_FOR_VALUES[self.name][1]
        return self.option.type is bool

    def value(self, raw: Any, source: str) -> Any:
        """Translate a raw value given under this name."""
        text = str(raw).lower() if isinstance(raw, (str, bool)) else ""
        if self.name in SAME_FOR_VALUES:
            _, values, instead = SAME_FOR_VALUES[self.name]
            if text not in values:
                raise UserError(
                    f"{self.name} {shown(raw)} is not an option of crosstune ({source}).", do=f"use {instead}"
                )
            return values[text]
        return SAME_VALUES.get(self.option.name, {}).get(text, raw)


def find_option(key: str, where: str, *, section: str = "", raw: Any = None) -> NamedOption | None:
    """Return the option for a name; None for a switch of another trainer or an earlier version that is off.

    `section` is the section of the file that contains the name, `raw` its value. Raise a UserError for an unknown name.
    """
    name = key.replace("-", "_")
    options, known = options_by_name(), peer_names()
    if name in (inside := known.sections.get(section, {})):
        return NamedOption(options[inside[name]], key)
    if found := options.get(name) or options.get(name.lower()):
        return NamedOption(found, key)
    peers = known.same.get(name) or SAME_FOR_VALUES.get(name, ("",))[0]
    if peers:  # null or an empty list in other trainers' files means not set
        is_set = raw not in (None, []) and not (name in known.off_by_default and _is_off(raw))
        return NamedOption(options[peers], name, is_peers=True) if is_set else None
    if name in known.different:
        if _is_off(raw) and (raw is None or name in known.off_by_default):
            return None
        raise UserError(
            f"{shown(key)[1:-1]} is not an option of crosstune ({where}).",
            do=f"instead: {known.different[name]}",
        )
    close = suggestions(key)
    do = (
        f"did you mean {' or '.join(close)}?"
        if close
        else "see crosstune options; `crosstune import FILE` reads the configuration of another trainer"
    )
    raise UserError(f"Unknown option: {where}.", do=do)


def suggestions(key: str) -> list[str]:
    """Return up to three options with similar names, but never one with the opposite meaning."""
    name = key.replace("-", "_").lower()[:100]
    options = options_by_name()
    known = {**dict.fromkeys(options, ""), **peer_names().same}
    found: list[str] = []
    for match in difflib.get_close_matches(name, known, n=6, cutoff=0.74):
        option = options[known[match] or match].name
        if option not in found and _negated(name) == _negated(match):
            found.append(option)
    if not found and len(name) > 3:  # a part of a name, such as early for early_stopping
        found = [o for o in options if name in o and not _negated(o)]
    return found[:3]


def names_of(option: Option) -> list[str]:
    """Return the other trainers' names for an option."""
    exact = [name for name, other in peer_names().same.items() if other == option.name]
    return exact + [name for name, (other, _, _) in SAME_FOR_VALUES.items() if other == option.name]


def _negated(name: str) -> bool:
    return bool(_NEGATIONS & set(name.split("_")))


def _is_off(raw: Any) -> bool:
    return not raw or (isinstance(raw, str) and raw.lower() in ("false", "none", "no"))
