"""Flags, environment and file to a Config: precedence, names, and all problems at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from crosstune.cli.main import main
from crosstune.config.load import load_config, make_config, to_yaml
from crosstune.config.option import check_duration
from crosstune.config.schema import Config, option_list
from crosstune.core.errors import ConfigError


def load(*flags: str, file: Path | None = None, **environment: str) -> Config:
    return load_config(flags, file=file, environment=environment)


def test_flag_wins_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("backend: mps\nlr: 0.5\n")
    assert load().backend == "auto"
    assert load(file=file).backend == "mps"
    assert load(file=file, FSDP_BACKEND="mlx").backend == "mlx"
    assert load("--backend", "cpu", file=file, FSDP_BACKEND="mlx").backend == "cpu"
    assert load(file=file, FSDP_BACKEND="mlx").lr == 0.5


def test_every_option_is_a_flag_with_dashes_or_underscores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("word").write_text("{}")  # for the option that names a file
    for option in option_list():
        value = {bool: "true", int: "3", float: "0.5", str: "word"}[option.type]
        if option.type is int:
            value = str(min(3, int(option.high or 3)))
        if option.choices:
            value = option.choices[0]
        if option.type in (int, float) and not (option.low or 0) <= float(value) <= (option.high or 9):
            value = str(option.low if option.default is None else option.default)
        if option.check is not None and option.type is str:
            durations = dict.fromkeys((o.name for o in option_list() if o.check is check_duration), "3h")
            usual = {"allow_mismatch": "data", "layers_to_transform": "0-3"}
            usual |= {"reward": "json", "reward_weights": "0.5"}
            value = (durations | usual).get(option.name, option.default or value)
        for name in (option.name, option.name.replace("_", "-"), *option.aliases):
            config = load(f"--{name}", value)
            assert option.name in config.sources
            assert getattr(config, option.name) == option.type(value if option.type is not bool else True)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--packing"], True),
        (["--packing", "true"], True),
        (["--packing=false"], False),
        (["--packing", "No"], False),
        (["--packing", "--strict"], True),
    ],
)
def test_booleans_take_a_word_or_nothing(words: list[str], expected: bool) -> None:
    assert load(*words).packing is expected


def test_negative_numbers_and_scientific_notation_are_values() -> None:
    config = load("--max_steps", "-1", "--lr", "1e-3", "--batch_size=4")
    assert (config.max_steps, config.lr, config.batch_size) == (-1, 1e-3, 4)


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (["chats.jsonl"], "--dataset chats.jsonl"),
        (["--lr", "1", "rows.PARQUET"], "--dataset rows.PARQUET"),
        (["run.yaml"], "--config run.yaml"),
        (["model-q4.gguf"], "--model_name model-q4.gguf"),
        (["--steps", "3"], "--max_steps"),
        (["--gpus", "2"], "--world_size"),
        (["--recipe", "dpo"], "--recipe preference --preference_loss dpo"),
        (["--recipe", "KTO"], "--recipe preference --preference_loss kto"),
        (["--recipe", "grpo"], "--recipe rl --rl_loss grpo"),
        (["--recipe", "prefrence"], "preference"),
    ],
)
def test_the_words_of_a_newcomer_lead_to_the_option(words: list[str], advice: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(words, environment={})
    assert advice in caught.value.problems[0].do


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("distill --teacher a", "crosstune train --recipe distill"),
        ("dpo", "crosstune train --recipe preference --preference_loss dpo"),
        ("trian", "did you mean train?"),
        ("report", "The following arguments are required"),
        ("export runs/a --to ggml", "Unknown --to 'ggml'"),
    ],
)
def test_a_wrong_command_names_itself_once(words: str, said: str, capsys: pytest.CaptureFixture) -> None:
    assert main(words.split()) == 2
    printed = capsys.readouterr().err
    assert said in printed and "crosstune: crosstune" not in printed


@pytest.mark.parametrize("stray", ["  ", " # comment"])
@pytest.mark.parametrize("before", [["--batch_size", "1"], ["--low_memory"]])
def test_words_after_a_backslash_are_named(before: list[str], stray: str) -> None:
    with pytest.raises(ConfigError, match="Unexpected argument") as caught:
        load_config([*before, stray], environment={})
    assert "backslash" in str(caught.value.problems[0].do)


@pytest.mark.parametrize("command", ["judge train", "generate runs/a", "latents build texts", "pairs make"])
def test_every_command_names_words_after_a_backslash(command: str, capsys: pytest.CaptureFixture) -> None:
    assert main([*command.split(), " "]) == 2
    assert "remove the spaces" in capsys.readouterr().err
    assert main([*command.split(), "--max_new_tokens", "3", " # then"]) == 2
    assert "remove the spaces" in capsys.readouterr().err


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("learning_rat: 1\nbatch_size: many\n")
    with pytest.raises(ConfigError) as caught:
        load("--precison", "bf16", "--lora_rank", "0", "--train_type", "qlra", "--seed", file=file)
    text = str(caught.value)
    assert len(caught.value.problems) == 6
    for words in (
        "learning_rat ",
        "batch_size cannot be 'many'",
        "did you mean precision",
        "lora_rank cannot be 0",
    ):
        assert words.strip() in text
    assert "did you mean qlora" in text
    assert "--seed needs a value" in text


@pytest.mark.parametrize("text", ["- a\n- b\n", "lr: [1\n", "\x00"])
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError):
        load(file=file)


def test_python_arguments_are_checked_like_flags() -> None:
    assert make_config(lr=1, model="x").model_name == "x"
    with pytest.raises(ConfigError, match="did you mean"):
        make_config(leanring_rate=1)
    with pytest.raises(ConfigError):
        make_config(packing=3)


def test_what_was_asked_round_trips_through_its_file(tmp_path: Path) -> None:
    asked = load("--lr", "1e-4", "--name", "x", "--packing", "--warmup_steps", "3")
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(asked))
    assert load(file=file) == asked
    assert set(load(file=file).sources) == {"lr", "name", "packing", "warmup_steps"}
