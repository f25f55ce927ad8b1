"""The --mlx_config file: mlx-lm's keys become options, engine settings are kept, unknown keys are rejected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import planned
import pytest

from crosstune.config.load import load_config, make_config
from crosstune.config.mlx_settings import MlxSettings, read_mlx_settings, read_settings
from crosstune.core.errors import ConfigError, UserError
from crosstune.estimate.machine import Machine
from crosstune.machines.probe import load_machine


def write(tmp_path: Path, **settings: Any) -> Path:
    path = tmp_path / "mlx.json"
    path.write_text(json.dumps(settings))
    return path


def test_words_of_mlx_lm_become_options(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        lora_parameters={
            "rank": 8,
            "scale": 2.5,
            "dropout": 0.1,
            "keys": ["self_attn.q_proj", "mlp.up_proj"],
        },
        learning_rate=1e-5,
        batch_size=3,
        iters=7,
        max_seq_length=512,
        grad_checkpoint=True,
        mask_prompt=False,
        seed=4,
    )
    config = load_config(["--mlx_config", str(path)])
    assert (config.lora_rank, config.lora_alpha, config.lora_dropout) == (8, 20.0, 0.1)
    assert config.lora_target_modules == "self_attn.q_proj,mlp.up_proj"
    assert (config.lr, config.batch_size, config.max_steps, config.context_length) == (1e-5, 3, 7, 512)
    assert config.use_gradient_checkpointing and config.train_on_prompt and config.seed == 4
    assert config.sources["lr"] == str(path)


def test_a_flag_comes_before_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, learning_rate=1e-5, batch_size=3)
    config = load_config(["--mlx_config", str(path), "--lr", "0.5"])
    assert (config.lr, config.batch_size) == (0.5, 3)


def test_yaml_and_alpha_are_read_too(tmp_path: Path) -> None:
    path = tmp_path / "mlx.yaml"
    path.write_text(
        "lora_parameters:\n  rank: 4\n  alpha: 12\nmemory_limit_gb: 8\ncompile: false\nnum_layers: 2\n"
    )
    assert load_config(["--mlx_config", str(path)]).lora_alpha == 12
    assert read_mlx_settings(str(path)) == MlxSettings(memory_limit_gb=8, compile=False, num_layers=2)
    assert read_mlx_settings(None) == MlxSettings()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"itres": 3}, "did you mean max_steps"),
        ({"lora_parameters": {"scale": 2.0}}, "needs a rank"),
        ({"memory_limit_gb": -1}, "0 or more"),
        ({"compile": 3}, "true or false"),
        ({"batch_size": 0}, "batch_size cannot be 0"),
        ({"lora_parameters": [1]}, "expected `key: value` lines"),
        ({"resume_adapter_file": "adapters.safetensors"}, "--base_adapter"),
        ({"optimizer": "adamw", "optimizer_config": {"adamw": {"weight_decay": 0.1}}}, "--wd"),
    ],
)
def test_what_cannot_be_read_is_told(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(["--mlx_config", str(write(tmp_path, **settings))])
    assert words in "\n".join(caught.value.lines())


def plan_on(machine: Machine, **options: Any) -> Any:
    settings = read_settings(make_config(**options).mlx_config)
    return planned.plan_on(machine, facts={"mlx_settings": settings}, **options)


def test_mlx_gets_what_it_has() -> None:
    mac = load_machine("apple-m2-max-64gb")
    plan = plan_on(mac, train_type="qlora", precision="bf16_autocast", optimizer="paged_adamw_8bit")
    assert (plan.backend.name, plan.quantizer, plan.precision) == ("mlx", "mlx", "bf16")
    assert plan.config.optimizer == "adamw"
    changed = {a.option for a in plan.adjustments if a.kind == "change"}
    assert changed == {"precision", "optimizer"}
    assert plan_on(mac, train_type="hqq_lora").quantizer == "mlx"
    assert plan_on(mac, optimizer="fused_adamw").config.optimizer == "adamw"
    with pytest.raises(UserError) as caught:
        plan_on(mac, train_type="qlora", group_size=16)
    assert "32, 64, 128" in "\n".join(caught.value.lines())
    with pytest.raises(UserError) as caught:
        plan_on(mac, train_type="qlora", n_bits=7)
    assert "7-bit" in "\n".join(caught.value.lines())


@pytest.mark.parametrize(
    ("flags", "alpha"), [([], 160.0), (["--lora_rank", "4"], 40.0), (["--use_rslora", "true"], 40.0)]
)
def test_scale_is_what_is_applied_whatever_the_rank(tmp_path: Path, flags: list[str], alpha: float) -> None:
    path = write(tmp_path, lora_parameters={"rank": 16, "scale": 10.0})
    assert load_config(["--mlx_config", str(path), *flags]).lora_alpha == alpha


OF_MLX_LM = """
model: org/model
train: true
fine_tune_type: dora
optimizer: adamw
optimizer_config:
  adam: {}
  adamw: {}
data: org/rows
seed: 0
batch_size: 4
iters: 1000
val_batches: 25
learning_rate: 1e-5
steps_per_report: 10
steps_per_eval: 200
resume_adapter_file: null
adapter_path: adapters
save_every: 100
test: false
test_batches: 500
max_seq_length: 2048
grad_checkpoint: false
lr_schedule: null
clear_cache_threshold: 0
report_to: null
project_name: null
lora_parameters:
  rank: 8
  dropout: 0.0
  scale: 20.0
"""


def warnings(plan: Any) -> list[str]:
    return [a.reason for a in plan.adjustments if a.option == "mlx_config" and a.kind == "warning"]


def test_a_whole_file_of_mlx_lm_is_read(tmp_path: Path) -> None:
    path = tmp_path / "lora.yaml"
    path.write_text(OF_MLX_LM)
    config = load_config(["--mlx_config", str(path)])
    assert (config.log_every_n_steps, config.eval_steps, config.save_steps) == (10, 200, 100)
    assert (config.train_type, config.optimizer, config.lora_alpha) == ("dora", "adamw", 160.0)
    assert config.project_name == "crosstune"
    [said] = warnings(plan_on(load_machine("apple-m2-max-64gb"), mlx_config=str(path)))
    for key in ("train", "test", "adapter_path", "val_batches", "test_batches", "clear_cache_threshold"):
        assert key in said
    assert "report_to" not in said
