"""The troubleshooting page quotes messages that exist, and names options that exist."""

from __future__ import annotations

import re

import pytest
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


@pytest.fixture(scope="module")
def source() -> str:
    return _source()


@pytest.mark.parametrize("message", [quoted for row in _ROWS for quoted in re.findall(r"`([^`]+)`", row)])
def test_a_quoted_message_exists(message: str, source: str) -> None:
    if message == "No space left on device":
        return  # of the system
    parts = re.split(r"\.\.\.|' '", message)
    for part in parts:
        fixed = part.strip().strip("'")
        assert len(fixed) < 2 or fixed in source, fixed


def test_the_page_quotes_most_of_what_users_meet() -> None:
    assert len(_ROWS) > 25


def test_the_options_on_the_page_exist() -> None:
    flags = set(re.findall(r"--(\w+)", PAGE.text))
    assert flags - OWN_FLAGS <= set(options_by_name())
