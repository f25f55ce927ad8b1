"""Promised command lines, planned on a machine of each backend, give the promised answers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from crosstune.cli.main import main

LLAMA = "--model_name meta-llama/Llama-2-7b-hf"

# machine, flags, what the plan must say
ACCEPTED: list[tuple[str, str, dict[str, Any]]] = [
    ("rtx-4090", "--backend auto", {"backend": "cuda"}),
    ("apple-m1-16gb", "--backend auto", {"backend": "mlx"}),
    ("cpu-laptop", "--backend auto", {"backend": "cpu"}),
    ("a100-80gb", "--backend cuda", {"backend": "cuda", "engine": "torch"}),
    ("apple-m1-16gb", "--backend mps", {"backend": "mps", "engine": "torch"}),
    (
        "apple-m2-max-64gb",
        f"--backend mps {LLAMA} --train_type qlora --batch_size 2 --precision fp16_autocast --num_epochs 1",
        {"method": "lora", "n_bits": 4, "precision": "fp16_autocast"},
    ),
    (
        "apple-m2-max-64gb",
        f"--backend mlx {LLAMA} --train_type qlora --world_size 1 --batch_size 4",
        {"quantizer": "mlx", "world_size": 1},
    ),
    (
        "a100-80gb",
        f"--backend cuda {LLAMA} --train_type qlora --precision bf16 --use_flash_attention true",
        {"precision": "bf16", "quantizer": "bnb", "changes": []},
    ),
    (
        "h200",
        f"--backend cuda {LLAMA} --train_type qlora --precision bf16 --quantization_backend bnb",
        {"quantizer": "bnb", "precision": "bf16"},
    ),
    (
        "apple-m1-16gb",
        f"--backend mps {LLAMA} --train_type qlora --precision fp16 --quantization_backend mlx",
        {"quantizer": "quanto", "precision": "fp16", "changes": ["quantization_backend"]},
    ),
    (
        "apple-m1-16gb",
        f"--backend mps {LLAMA} --train_type qlora --precision fp16 --quantization_backend quanto",
        {"quantizer": "quanto", "changes": []},
    ),
    ("apple-m1-16gb", "--backend mps --precision bf16", {"precision": "fp16", "changes": ["precision"]}),
    (
        "apple-m2-max-64gb",
        "--backend mlx --model_name models/llama-2-7b-mlx --train_type qlora --mlx_config config.json",
        {"engine": "mlx", "quantizer": "mlx"},
    ),
    (
        "cpu-laptop",
        f"--backend cpu {LLAMA} --train_type qlora --batch_size 1 --gradient_accumulation_steps 4 --precision fp32",
        {"precision": "fp32", "changes": []},
    ),
    (
        "cpu-laptop",
        "--train_type qlora --quantization_backend hqq --n_bits 4 --group_size 128",
        {"quantizer": "hqq", "n_bits": 4},
    ),
    ("h200", "--profile true --profiling_output ./profile_results", {"backend": "cuda"}),
    ("apple-m1-16gb", "--backend mps --use_gradient_checkpointing --low_memory", {"backend": "mps"}),
    # The guides call this impossible; MLX has learned it since.
    ("apple-m1-16gb", "--backend mlx --world_size 2", {"world_size": 2, "collective": "ring"}),
]

# machine, flags, words of the answer
REFUSED = [
    ("apple-m1-16gb", "--backend cuda", "Backend 'cuda' is not available"),
    ("rtx-4090", "--backend tpu", "backend cannot be 'tpu'"),
    ("apple-m1-16gb", "--backend mps --precision bf16 --strict", "doesn't support bfloat16"),
]


@pytest.fixture(autouse=True)
def small_default(tiny_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSTUNE_CACHE", str(tiny_cache))


@pytest.mark.parametrize(("machine", "flags", "expected"), ACCEPTED)
def test_a_promised_command_is_planned_as_promised(
    machine: str,
    flags: str,
    expected: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text('{"lora_parameters": {"rank": 8, "scale": 20.0, "dropout": 0.0}}')
    code = main(["plan", "--machine", machine, "--json", *flags.split()])
    plan = json.loads(capsys.readouterr().out)
    assert code == (2 if plan["cannot_train"] else 0)
    assert plan["cannot_train"] == expected.pop("cannot_train", [])
    changes = expected.pop("changes", None)
    assert {key: plan[key] for key in expected} == expected
    if changes is not None:
        assert [a["option"] for a in plan["adjustments"] if a["kind"] == "change"] == changes


@pytest.mark.parametrize(("machine", "flags", "words"), REFUSED)
def test_what_cannot_work_is_answered(
    machine: str, flags: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--machine", machine, *flags.split()]) == 2
    assert words in capsys.readouterr().err


def test_the_environment_chooses_a_backend(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FSDP_BACKEND", "mps")
    assert main(["plan", "--machine", "apple-m1-16gb", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["backend"] == "mps"


def test_a_plan_that_cannot_be_trained_ends_as_training_would(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--machine", "apple-m1-16gb", "--backend", "mlx", "--train_type", "llama_pro"]
    assert main(words) == 2
    said = capsys.readouterr()
    assert "cannot train llama_pro does not train on MLX." in said.out
    assert "do:  use --train_type lora" in said.err
    assert main([*words, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["cannot_train"] == ["llama_pro does not train on MLX."]


def test_a_plan_says_what_mlx_lm_cannot_read(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mlx_lm", reason="the mlx extra is not installed")
    model = shutil.copytree(tiny_model, tmp_path / "strange")
    config = json.loads((model / "config.json").read_text()) | {"model_type": "unheard_of"}
    (model / "config.json").write_text(json.dumps(config))
    words = ["--backend", "mlx", "--model_name", str(model)]
    assert main(["plan", "--machine", "apple-m1-16gb", *words]) == 2
    assert "MLX cannot run a 'unheard_of' model." in capsys.readouterr().out
    assert main(["train", *words, "--output_dir", str(tmp_path / "runs"), "--max_steps", "1"]) == 2


PROMISED_OPTIONS = """world_size train_type llama_pro_path batch_size context_length gradient_accumulation_steps num_epochs
        dataset dataset_samples sharding_strategy use_gradient_checkpointing reentrant_checkpointing use_cpu_offload
        use_activation_cpu_offload low_memory no_sync precision model_name save_model output_dir lora_rank lora_alpha
        lora_dropout lora_target_modules verbose lr apply_gradient_clipping grad_norm wd profile_memory optimizer
        lr_scheduler loading_workers log_to master_addr master_port seed project_name name group entity n_bits profile
        profiling_output with_stack with_shapes export_trace export_memory_timeline wait_steps warmup_steps
        active_steps repeat profiling_frequency max_steps backend warmup_ratio cosine_min_lr_ratio log_every_n_steps
        hqq_group_size profiler_warmup_steps use_flash_attention quantization_backend mlx_config group_size
        model epochs gradient_accumulation max_seq_length max_samples test_samples no_4bit skip_eval recipe save_steps
        eval_steps keep_last_n resume strict packing"""


def test_every_promised_option_is_there() -> None:
    from crosstune.config.schema import options_by_name

    assert set(PROMISED_OPTIONS.split()) - set(options_by_name()) == set()


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600
    )


def test_imports_profiles_and_help_load_no_framework() -> None:
    code = """
import sys
import backend_manager, quantization_wrapper
import crosstune.machines.probe as m
import crosstune.torch_engine.probe, crosstune.mlx_engine.probe
m.recommend(m.load_machine('h200'))
late = {"torch", "mlx", "transformers"} & set(sys.modules)
assert not late, late
"""
    run_python(code)
    code = """
import sys
import crosstune
from crosstune.cli.main import main
main(["--help"])
print("options read:", "crosstune.config" in sys.modules, "yaml" in sys.modules)
try:
    main(["plan", "--help"])
except SystemExit:
    pass
heavy = {"torch", "mlx", "transformers", "numpy", "rich", "datasets", "peft"} & set(sys.modules)
print("heavy:", sorted(heavy))
"""
    said = run_python(code).stdout
    assert said.strip().endswith("heavy: []") and "options read: False False" in said


def test_train_py_is_crosstune_train() -> None:
    from pathlib import Path

    script = Path(__file__).parents[2] / "train.py"
    by_file = subprocess.run(
        [sys.executable, str(script), "--help"], capture_output=True, text=True, check=True
    )
    by_name = subprocess.run(
        [sys.executable, "-m", "crosstune", "train", "--help"], capture_output=True, text=True, check=True
    )
    assert by_file.stdout == by_name.stdout
    assert "--lora_rank" in by_file.stdout
