"""The troubleshooting page quotes messages that exist, and names options that exist."""

from __future__ import annotations

import re

from pages import ROOT, Page

from crosstune.config.schema import options_by_name

PAGE = Page("troubleshooting.md")
OWN_FLAGS = {"machine", "json", "show"}
"""Flags of plan, doctor and data that are not options of a run."""
_ROWS = re.findall(r"^\| (`[^|]*) \| [^|]* \| [^|]* \|$", PAGE.text, re.M)


def _source() -> str:
    """Return the source of the package with the parts of each string joined."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    return re.sub(r'"\s*\n\s*f?"', "", text)


def test_quoted_messages_exist() -> None:
    source = _source()
    messages = {quoted for row in _ROWS for quoted in re.findall(r"`([^`]+)`", row)}
    parts = {part.strip().strip("'") for message in messages for part in re.split(r"\.\.\.|' '", message)}
    parts.remove("No space left on device")  # of the system
    assert len(_ROWS) > 25 and [part for part in parts if len(part) > 1 and part not in source] == []


def test_the_options_on_the_page_exist() -> None:
    flags = set(re.findall(r"--(\w+)", PAGE.text))
    assert flags - OWN_FLAGS <= set(options_by_name())
