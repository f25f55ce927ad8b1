"""Runs with options of adapters, PEFT with the same options, and what both must have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from test_peft_parity import column, order_of_rows, reference_run, start_adapter
from transformers import AutoModelForCausalLM

from crosstune.api.model import load
from crosstune.config.load import make_config
from crosstune.runs.pipeline import train

NUM_STEPS = 10
TOKENS = list(range(5, 25))
ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
COMMON: dict[str, Any] = {
    "train_type": "lora",
    "precision": "fp32",
    "batch_size": 2,
    "gradient_accumulation_steps": 1,
    "lr": 3e-3,
    "wd": 0.05,
    "grad_norm": 0.5,
    "seed": 3,
    "lora_rank": 8,
    "lora_alpha": 16,
}

ORDER = order_of_rows(COMMON, NUM_STEPS + 1)


def run_options(model: Path, data: Path, folder: Path, **options: Any) -> dict[str, Any]:
    shared = {"model_name": str(model), "dataset": str(data), "output_dir": str(folder), "name": "run"}
    fixed = {"lr_scheduler": "constant", "max_steps": NUM_STEPS, "skip_eval": True, "backend": "cpu"}
    return COMMON | shared | fixed | options


def peft_losses(model: Path, **settings: Any) -> list[float]:
    """The losses of PEFT, with one after the last step of a run."""

    def make(folder: Path, train_type: str, seed: int, *, dtype: torch.dtype) -> Any:
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        config = LoraConfig(
            **{"r": 8, "lora_alpha": 16, "target_modules": ALL_LINEAR, "task_type": "CAUSAL_LM"} | settings
        )
        adapted = get_peft_model(base, config)
        if config.init_lora_weights is True:
            start_adapter(adapted, seed=seed)
        return adapted

    return reference_run(model, COMMON, ORDER, make=make).losses


def peft_logits(base: Path, adapter: Path, *, size: int | None = None) -> np.ndarray:
    """The logits of the base with the adapter, opened as PEFT's users do."""
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if size is not None:
        plain.resize_token_embeddings(size)
    opened = PeftModel.from_pretrained(plain, adapter).eval()
    with torch.no_grad():
        return opened(input_ids=torch.tensor([TOKENS])).logits[0].numpy()


def loss_in_peft(base: Path, adapter: Path) -> float:
    """The loss of a saved adapter in PEFT on the rows after the last step."""

    def make(folder: Path, train_type: str, seed: int, *, dtype: torch.dtype) -> Any:
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        return PeftModel.from_pretrained(plain, adapter, is_trainable=True)

    return reference_run(base, COMMON, ORDER[-1:], make=make).losses[0]


def run_everywhere(model: Path, data: Path, folder: Path, **options: Any) -> tuple[dict[str, Any], Path]:
    """Train on torch, on the fast layers and on MLX, with equal losses; return the options and the folder of the last."""
    losses = {}
    for name, kind in {
        "plain": {"backend": "cpu"},
        "fast": {"backend": "cpu", "kernels": "fast"},
        "mlx": {"backend": "mlx"},
    }.items():
        asked = run_options(model, data, folder / name, **options, **kind)
        run = train(make_config(**asked)).folder
        losses[name] = column(run, "loss")
    assert losses["fast"] == pytest.approx(losses["plain"], rel=1e-5)
    assert losses["mlx"] == pytest.approx(losses["plain"], rel=1e-5)
    return asked, run


def check_result(run: Path, base: Path, *, after: float | None = None, bound: float = 1e-5) -> None:
    """The run, its adapter in PEFT and the merged model have one set of logits, which are not those of the base, and the
    loss `after` the last step."""
    if after is not None:
        assert loss_in_peft(base, run / "adapter") == pytest.approx(after, rel=1e-4)
    opened = load(run, backend="cpu", progress=False)
    ours = opened.logits(TOKENS)
    assert peft_logits(base, run / "adapter") == pytest.approx(ours, abs=bound)
    merged = load(opened.merge(run.parent / "merged"), backend="cpu", progress=False)
    assert merged.logits(TOKENS) == pytest.approx(ours, abs=bound)
    assert np.abs(load(base, backend="cpu", progress=False).logits(TOKENS) - ours).max() > 100 * bound


def check_resume(folder: Path, asked: dict[str, Any], straight: Path, *, backend: str) -> None:
    """Stop after half of the steps, resume, and have the bytes of a run that did not stop."""
    half = asked | {"backend": backend, "save_steps": 5, "output_dir": str(folder)}
    train(make_config(**half | {"max_steps": 5}))
    train(make_config(**half | {"resume": "auto"}))
    name = Path("adapter", "adapter_model.safetensors")
    assert (folder / "run" / name).read_bytes() == (straight / name).read_bytes()
