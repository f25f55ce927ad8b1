"""Folders of the user: a home that is not known is named with the option that it was given for."""

from __future__ import annotations

from pathlib import Path

import pytest

from crosstune.core.errors import UserError
from crosstune.files.paths import cache_base, check_home

UNKNOWN = "~nobody-has-this-account/models"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--output_dir", UNKNOWN], "--output_dir: the home folder in ~nobody-has-this-account/models is"),
        ([f"--output_dir={UNKNOWN}"], "--output_dir: the home folder in ~nobody"),
        ([UNKNOWN, "--out", "here"], "The home folder in ~nobody"),
        (["runs/one", UNKNOWN], "The home folder in ~nobody"),
    ],
)
def test_an_unknown_home_is_named_with_its_option(words: list[str], said: str) -> None:
    with pytest.raises(UserError) as caught:
        check_home(words)
    assert caught.value.message.startswith(said)
    assert "no such account" in str(caught.value) and "full path" in caught.value.do


def test_a_known_home_and_other_words_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    check_home(["--output_dir", "~/runs", "--dataset=~", "~/model", "--prompt", "a ~b"])


def test_the_cache_is_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_base(Path("~/cache")) == tmp_path / "cache"
