"""Invalid values and folders of options: rejected with the option's name and a short message, from every source."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import math
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from crosstune.cli import commands
from crosstune.config.load import cache_base, load_config, make_config
from crosstune.config.schema import option_list
from crosstune.core.errors import ConfigError, UserError, shown
from crosstune.core.sampling import Sampling
from crosstune.distributed.environment import ranks_in


def refusal(*flags: str, file: Path | None = None, **environment: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(flags, file=file, environment=environment)
    return "\n".join(caught.value.lines())


def test_every_number_has_limits() -> None:
    numbers = [option for option in option_list() if option.type in (int, float)]
    assert [o.name for o in numbers if o.low is None or o.high is None] == []
    for option in numbers:
        assert option.default is None or option.low <= option.default <= option.high  # type: ignore[operator]
        assert f"{option.name} cannot be" in refusal(f"--{option.name}={option.high * 2 + 1:.0f}")  # type: ignore[operator]


NO_NUMBERS = [
    "9" * 400,
    "9" * 5000,
    "-" + "9" * 400,
    "1e400",
    "nan",
    "-inf",
    "0b_",
    "2024-13-45",
    "٣",
    "½",
    "1e",
    "",
    "1 2",
    "1.5",
]
ABSURD = ["0", "-1", "0.5", "1e30", "-1e30", "1e400", "nan", "-inf", "9" * 400, str(2**63), "1e-320"]


def test_an_absurd_number_is_refused_or_within_the_limits_of_every_option() -> None:
    """0.5 s for all of them."""
    for option in option_list():
        for value in ABSURD if option.type in (int, float) else ():
            try:
                found = getattr(load_config([f"--{option.name}={value}"], environment={}), option.name)
            except ConfigError as error:
                said = "\n".join(error.lines())
                assert f"{option.name} cannot be" in said and "Traceback" not in said
                assert len(said) < 400, said
            else:
                assert option.low <= found <= option.high, f"--{option.name}={value}"  # type: ignore[operator]


def _numbers_of_commands() -> Iterator[tuple[str, Callable[[str], Any]]]:
    """Yield the numbers among the own arguments of all commands, each with the function that reads it."""
    for module in pkgutil.iter_modules(commands.__path__, f"{commands.__name__}."):
        for name, make in vars(importlib.import_module(module.name)).items():
            for action in make()._actions if name.startswith("make_parser") else ():
                reads_number = "at_least" in getattr(action.type, "__qualname__", "")
                if reads_number or action.type in (int, float):
                    yield f"{module.name}.{name} {action.dest}", action.type


def test_an_absurd_number_is_refused_by_every_command() -> None:
    found = dict(_numbers_of_commands())
    sampling = {field.name for field in dataclasses.fields(Sampling)}
    unchecked = {name.split()[-1] for name, read in found.items() if read in (int, float)}
    assert len(found) > 40 and unchecked <= sampling, "`Sampling` checks its own"
    for name, read in found.items():
        for value in ("nan", "-inf", "1e400", "9" * 5000, "1 2", "", "-1e30"):
            if name.split()[-1] not in unchecked:
                with pytest.raises(argparse.ArgumentTypeError) as caught:
                    read(value)
                assert len(str(caught.value)) < 200, name
    for name in sampling:
        for value in (math.nan, -math.inf, math.inf, -1e30):
            with pytest.raises(UserError, match=f"--{name} cannot be"):
                Sampling(**{name: value})


NOT_NUMBERS = [10**400, 10**5000, -(10**400), float("inf"), [1], {"a": 1}, b"1", True, None, object()]
NO_PATHS = ["", "  ", "a\0b", "a\x1b[2Jb", "\udcff", "x" * 5000, "y" * 256, "~nobody-here/x"]


@pytest.mark.parametrize("option", ["batch_size", "seed", "warmup_steps"])
def test_a_number_is_a_number_within_its_limits(option: str) -> None:
    for value in NO_NUMBERS:
        text = refusal(f"--{option}={value}")
        assert f"{option} cannot be" in text and f"--{option}" in text
        assert len(text) < 400


@pytest.mark.parametrize("option", ["batch_size", "lr"])
def test_values_of_other_types_are_refused(option: str) -> None:
    for value in NOT_NUMBERS:
        with pytest.raises(ConfigError) as caught:
            make_config(**{option: value})
        assert f"{option} cannot be" in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize("option", ["dataset", "output_dir", "model_name", "eval_dataset"])
def test_a_path_is_text_that_can_be_one(option: str) -> None:
    for value in NO_PATHS:
        text = refusal(f"--{option}={value}")
        assert f"{option} cannot be" in text and len(text) < 400
        assert all(char.isprintable() or char == "\n" for char in text)


def test_a_run_name_is_a_plain_folder_name() -> None:
    for value in ("x" * 300, "é" * 150, "a/b", "..", ".", "-x", "a\nb", " a", "a\\b", ""):
        assert "name cannot be" in refusal(f"--name={value}")


def test_a_time_limit_names_its_key() -> None:
    for value in ("3x", "0s", "", "9" * 400, "1h1h1", "99999999d", "-3h", "3 h"):
        assert "time_limit cannot be" in refusal(f"--time_limit={value}")


def test_booleans_have_a_few_spellings() -> None:
    assert [load_config([f"--packing={v}"]).packing for v in ("TRUE", "y", "On", "1", "n", "f", "0")] == [
        *[True] * 4,
        *[False] * 3,
    ]
    for value in ("maybe", "2", "", "truee"):
        assert "packing cannot be" in refusal("--packing", value)


def test_yaml_words_that_are_booleans_are_not_strings(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("name: no\n")
    assert "quotes" in refusal(file=file)


def test_an_endless_value_is_shown_in_short() -> None:
    bomb: list[Any] = ["x"]
    for _ in range(60):
        bomb = [bomb] * 9
    assert len(shown(bomb)) <= 80
    assert shown(10**5000) == "an integer of 5,001 digits"
    with pytest.raises(ConfigError) as caught:
        make_config(lr=bomb, lora_target_modules=bomb)
    assert len(str(caught.value)) < 500


def test_errors_escape_what_a_terminal_would_obey() -> None:
    error = UserError("a\x1b]52;c;aGk=\x07", why="\u202eb\udcff", do="c" * 10_000)
    text = "\n".join(error.lines())
    assert all(char.isprintable() or char == "\n" for char in text) and len(text) < 2500


@pytest.mark.parametrize(
    "environment",
    [
        {"RANK": "x", "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "many"},
        {"RANK": "2", "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "9" * 5000},
        {"MLX_RANK": "9" * 5000, "MLX_HOSTFILE": "{hosts}"},
        {"MLX_RANK": "0", "MLX_HOSTFILE": "{hosts}", "CROSSTUNE_LAUNCHER": "x"},
        {"MLX_RANK": "0", "MLX_HOSTFILE": "/nowhere"},
    ],
)
def test_a_bad_variable_is_named(tmp_path: Path, environment: dict[str, str]) -> None:
    hosts = tmp_path / "hosts.json"
    hosts.write_text('[["10.0.0.1:5000"], ["10.0.0.2:5000"]]')
    given = {name: value.replace("{hosts}", str(hosts)) for name, value in environment.items()}
    with pytest.raises(UserError) as caught:
        ranks_in(given)
    assert any(name in str(caught.value) for name in environment) and len(str(caught.value)) < 500
    assert "FSDP_BACKEND" in refusal(FSDP_BACKEND="9" * 5000)


def test_the_cache_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("~nobody-here/x", "y" * 300, "\udcff"):
        monkeypatch.setenv("CROSSTUNE_CACHE", value)
        with pytest.raises(UserError, match="CROSSTUNE_CACHE"):
            cache_base()


def test_the_cache_is_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CROSSTUNE_CACHE", "~/cache")
    assert cache_base() == tmp_path / "cache"
