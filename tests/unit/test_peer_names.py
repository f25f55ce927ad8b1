"""Option names of other trainers: accepted if they mean the same, explained otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from crosstune.config.conditions import check_losses
from crosstune.config.load import load_config, make_config
from crosstune.config.peer_names import PREFERENCE_LOSSES, peer_names
from crosstune.config.schema import Config, options_by_name
from crosstune.config.values import convert_value
from crosstune.core.errors import ConfigError


def load(*flags: str, file: Path | None = None) -> Config:
    return load_config(flags, file=file, environment={})


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def test_a_name_that_means_the_same_is_the_option(tmp_path: Path) -> None:
    for name, target in peer_names().same.items():
        option = options_by_name()[target]
        value: Any = {bool: "true", int: 3, float: 0.25, str: "word"}[option.type]
        value = (
            option.choices[0]
            if option.choices
            else {"log_to": "wandb", "layers_to_transform": "0-1"}.get(option.name, value)
        )
        config = make_config(**{name: value})
        assert getattr(config, option.name) == convert_value(option, value, "here"), name
        assert list(config.sources) == [option.name] and config.renamed == {option.name: name}
    for config in (load("--lora_r", "3"), load("--lora-r=3"), load(file=write(tmp_path, "lora_r: 3\n"))):
        assert config.lora_rank == 3 and config.renamed == {"lora_rank": "lora_r"}


def test_any_other_name_is_explained(tmp_path: Path) -> None:
    for name in peer_names().different:
        with pytest.raises(ConfigError, match="instead: ") as caught:
            load(f"--{name.replace('_', '-')}", "8")
        assert name in str(caught.value).replace("-", "_")
    with pytest.raises(ConfigError, match="instead: "):
        load(file=write(tmp_path, "load_in_4bit: 8\n"))


def test_a_switch_that_is_off_says_nothing(tmp_path: Path) -> None:
    file = write(tmp_path, "load_in_8bit: false\nload_in_4bit: false\ndeepspeed:\nval_set_size:\nlr: 0.1\n")
    assert set(load(file=file).sources) == {"lr"}
    for value in ("false", "0", ""):
        assert not load(file=write(tmp_path, f"neftune_noise_alpha: {value}\n")).sources
    assert load(file=write(tmp_path, "noisy_embedding_alpha: 5\n")).neftune_alpha == 5
    with pytest.raises(ConfigError, match="load_in_4bit"):
        load(file=write(tmp_path, "load_in_4bit: true\n"))
    with pytest.raises(ConfigError, match="shuffle"):
        load(file=write(tmp_path, "shuffle: false\n"))
    assert not load(file=write(tmp_path, "cuda_graphs: false\n")).sources  # of an earlier version


def test_values_are_translated_too(tmp_path: Path) -> None:
    assert load("--mask-prompt").train_on_prompt is False
    assert load("--mask_prompt=false").train_on_prompt is True
    assert load("--optim", "adamw_torch_fused").optimizer == "fused_adamw"
    assert load("--optimizer", "adamw_bnb_8bit").optimizer == "adamw_8bit"
    assert load("--optim", "lion_32bit").optimizer == "lion"
    assert load("--lora_target_linear").lora_target_modules == "all"
    assert load("--target_modules", "all-linear").lora_target_modules == "all"
    assert load("--adapter", "qlora").train_type == "qlora"
    lists = "lora_modules_to_save: [embed_tokens, lm_head]\nlayers_to_transform: [0, 2]\n"
    config = load(file=write(tmp_path, lists))
    assert (config.modules_to_save, config.layers_to_transform) == ("embed_tokens,lm_head", "0,2")
    empty = load(file=write(tmp_path, "lora_modules_to_save: []\npeft_layers_to_transform:\n"))
    assert (empty.modules_to_save, empty.layers_to_transform) == (None, None)
    assert (
        load(file=write(tmp_path, "lora_target_modules: [q_proj, v_proj]")).lora_target_modules
        == "q_proj,v_proj"
    )
    with pytest.raises(ConfigError, match="lora_target_linear"):
        load("--lora_target_linear", "false")


@pytest.mark.parametrize("flag", ["--resume_from_checkpoint", "--resume"])
def test_a_value_of_another_trainer_is_noted(flag: str) -> None:
    config = load(flag, "True", "--name", "a")
    assert config.resume == make_config(resume_from_checkpoint=True).resume == "auto"
    assert config.renamed == {"resume": f"{flag[2:]} True"}
    assert load(flag, "runs/a").renamed == {} and load(flag, "false").resume == "none"
    assert load("--use_gradient_checkpointing", "unsloth").use_gradient_checkpointing is True
    assert load("--use_gradient_checkpointing").renamed == {}


def test_micro_batches_are_not_steps() -> None:
    assert load("--iters", "5").max_steps == 5
    with pytest.raises(ConfigError, match="iters"):
        load("--iters", "5", "--grad_accumulation_steps", "2")


def test_known_sections_are_flattened(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "model:\n  name: m\n  use_gradient_checkpointing: true\nlora:\n  r: 4\n  alpha: 8\n"
        "optimizer:\n  name: adam\n  lr: 0.1\n  beta2: 0.95\ntraining:\n  epochs: 2\n  per_device_train_batch_size: 3\n",
    )
    config = load(file=file)
    assert (config.model_name, config.use_gradient_checkpointing) == ("m", True)
    assert (config.lora_rank, config.lora_alpha, config.optimizer, config.lr) == (4, 8, "adam", 0.1)
    assert config.adam_beta2 == 0.95
    assert (config.num_epochs, config.batch_size) == (2, 3)
    assert load("--model.lora_rank=7", "--optimizer.name", "adam").lora_rank == 7


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lr: 1\noptimizer:\n  lr: 2\n", "lr is set twice"),
        ("lr: 1\nlearning_rate: 2\n", "lr is set twice"),
        ("nowhere:\n  lr: 2\n", "'nowhere' in "),
        ("model:\n  hidden_width: 2\n", "model.hidden_width"),
        ("model:\n  lora:\n    r: 2\n", "model.lora"),
    ],
)
def test_what_is_ambiguous_or_unknown_is_said(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(file=write(tmp_path, text))
    assert words in str(caught.value)


def test_a_loss_of_another_trainer_is_answered_with_our_name() -> None:
    for theirs, ours in PREFERENCE_LOSSES.items():
        said = check_losses(theirs)
        assert said is None if theirs == ours else f"{theirs} is called {ours} here" in str(said)
