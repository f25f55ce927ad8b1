"""A run folder in the form that crosstune 0.1.0 wrote continues bit for bit, with options that were renamed since."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from injection.bench import read_bits
from safetensors.numpy import save_file
from support import chat

from crosstune.checkpoint.read import open_checkpoint
from crosstune.config.load import make_config
from crosstune.core.errors import UserError
from crosstune.core.protocols import SessionState
from crosstune.files.json_files import read_jsonl
from crosstune.models.tiny import tiny_model
from crosstune.runs.pipeline import train

IDENTITY = {
    "model": {
        "name": "model",
        "identity": "bb60d70905c890e882dbde18cfd270a6c25ddf40c30838939328e7a4d8fbaf5f",
        "config": "68e4a8436d726f381961bd85dfe599d2ad0b97a25e5911dedb0f9e8911e93da1",
    },
    "data": "520836020cda06e6a78d33429ca736cb224bda1a13d366785bf2a87568c030b5",
    "eval_data": None,
    "order": {"seed": 42, "rows_per_step": 2, "packing": None},
    "quantization": None,
    "trainable": {
        "method": "lora",
        "lora_alpha": 32,
        "lora_rank": 2,
        "lora_target_modules": "all",
        "use_rslora": False,
    },
    "optimizer": "adamw",
}
OPTIONS: dict[str, Any] = {"model_name": "model", "dataset": "data.jsonl", "lora_rank": 2}
OPTIONS |= {"lora_dropout": 0.1, "max_steps": 4, "batch_size": 2, "lr": 0.001, "backend": "cpu"}
OPTIONS |= {"precision": "fp32", "output_dir": "runs", "save_steps": 2, "skip_eval": True}
OLD_NAMES = {"group": "mine", "wait_steps": 1, "grad_norm": 1.0}
"""Options whose names have changed, as 0.1.0 recorded them."""
RESOLVED = {"kernels": "general", "gradient_accumulation_steps": 1, "world_size": -1}
RESOLVED |= {"num_epochs": 0, "seed": 42, "verdict": "auto", "cuda_graphs": False}
"""Some of the resolved options, with ones that exist no more."""


def write_old_run(run: Path, state: SessionState) -> None:
    """Write the folder of a run that was killed after step 2, without the writers of this crosstune."""
    folder = run / "checkpoints" / "step-00000002"
    folder.mkdir(parents=True)
    moments = {f"{slot}/{name}": a for slot, arrays in state.moments.items() for name, a in arrays.items()}
    for name, arrays in (("weights", state.weights), ("moments", moments), ("random", state.random)):
        save_file(dict(arrays), folder / f"{name}.safetensors")
    asked = {**OPTIONS, **OLD_NAMES, "name": run.name}
    manifest = {
        "format": "crosstune-checkpoint",
        "format_version": 1,
        "step": 2,
        "created": "2026-01-02T03:04:05+00:00",
        "engine": "torch",
        "backend": "cpu",
        "precision": "fp32",
        "quantization": None,
        "method": "lora",
        "recipe": "sft",
        "identity": IDENTITY,
        "schedule": {"name": "cosine", "step": 2, "num_steps": 4, "next_lr": 0.00055},
        "data": {"rows_done": 4, "epoch": 0, "row_in_epoch": 4, "next_examples": [5, 1]},
        "progress": {"steps": 2, "tokens": 88, "supervised_tokens": 8, "seconds": 0.1, "wall_s": 0.3},
        "asked": asked,
        "options": asked | RESOLVED,
        "versions": {"crosstune": "0.1.0"},
        "resumed_from": None,
        "trainable": {name: {"dtype": "F32", "shape": list(a.shape)} for name, a in state.weights.items()},
        "facts": {"loss_scale": {"factor": 1.0, "good_steps": 0}},
        "files": {
            path.name: {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
            for path in folder.iterdir()
        },
    }
    raw = (json.dumps(manifest, indent=1) + "\n").encode()
    (folder / "manifest.json").write_bytes(raw)
    (folder / "manifest.sha256").write_text(f"{hashlib.sha256(raw).hexdigest()}  manifest.json\n")
    (run / "config.yaml").write_text("".join(f"{name}: {value}\n" for name, value in asked.items()))
    (run / "plan.json").write_text(json.dumps({"created": manifest["created"], "asked": asked}))
    (run / "events.jsonl").write_text("")


@pytest.fixture
def straight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A whole run of four steps with a checkpoint at step 2."""
    monkeypatch.chdir(tmp_path)
    tiny_model(Path("model"), hidden=32, intermediate=64, num_layers=1, num_heads=2, num_kv_heads=1)
    rows = [chat(f"{a} + {b}?", str(a + b)) for a in range(6) for b in range(4)]
    Path("data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return train(make_config(**OPTIONS, kernels="general", name="straight")).folder


def test_an_old_run_continues_bit_for_bit(straight: Path) -> None:
    now = open_checkpoint(straight / "checkpoints" / "step-00000002")
    assert now.manifest.identity == IDENTITY, "old runs are refused if their data or model has another hash"
    old = Path("runs/old")
    write_old_run(old, now.load())
    rows = (straight / "metrics.jsonl").read_text().splitlines(keepends=True)
    (old / "metrics.jsonl").write_text("".join(rows[:2]))
    result = train(make_config(resume=str(old)))
    assert result.summary["status"] == "finished" and result.folder == old
    assert read_bits(old) == read_bits(straight)
    [resumed] = [event for event in read_jsonl(old / "events.jsonl") if event["kind"] == "resumed"]
    assert resumed["changed_options"] == []
    config = (old / "config.yaml").read_text()
    assert "tracker_group: mine" in config and "profile_wait_steps: 1" in config


def test_an_old_run_keeps_the_rules_of_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_jsonl: Any
) -> None:
    """Its data has duplicates, and its template ends prompts with a space."""
    monkeypatch.chdir(tmp_path)
    tiny_model(Path("model"), hidden=32, intermediate=64, num_layers=1, num_heads=2, num_kv_heads=1)
    Path("model/chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    data = write_jsonl([chat(f"What {n % 15}?", f"the {n % 15}") for n in range(30)])
    options = OPTIONS | {"dataset": str(data), "skip_eval": False, "num_samples": 0, "kernels": "general"}
    old = train(make_config(**options, name="old", data_rules=1)).folder
    for checkpoint in (old / "checkpoints").glob("step-*"):
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        for recorded in (manifest["options"], manifest["asked"]):  # as in a run from before the option
            del recorded["data_rules"]
        raw = json.dumps(manifest).encode()
        (checkpoint / "manifest.json").write_bytes(raw)
        (checkpoint / "manifest.sha256").write_text(f"{hashlib.sha256(raw).hexdigest()}  manifest.json\n")
    result = train(make_config(resume=str(old), max_steps=5))
    assert result.summary["status"] == "finished"
    with pytest.raises(UserError, match=r"(?s)does not match the checkpoint.*data_rules"):
        train(make_config(resume=str(old), max_steps=6, data_rules=2))
