"""Training on pictures equals a plain loop of transformers' processors and PEFT, for each vision-language family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapter_runs import column
from peft import LoraConfig, PeftModel, get_peft_model
from PIL import Image
from test_peft_parity import start_adapter
from transformers import (
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoTokenizer,
    Gemma3Processor,
    Idefics3Processor,
    Qwen2_5_VLProcessor,
    Qwen3VLProcessor,
)
from vision_models import FAMILIES, tiny_vision, write_rows

from crosstune.config.load import make_config
from crosstune.runs.pipeline import train

NUM_STEPS, ROWS = 8, 12
PROJECTOR = {"qwen2_5_vl": "visual.merger", "gemma3": "multi_modal_projector"}
OPTIONS: dict[str, Any] = {
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
    "lr_scheduler": "constant",
    "skip_eval": True,
    "backend": "cpu",
}
LANGUAGE = r".*(language_model|text_model).*\.(q|k|v|o|gate|up|down)_proj"
TOWER = r".*(visual\.blocks|vision_model|vision_tower).*(proj|qkv|fc1|fc2|linear_fc1|linear_fc2)"


def processor_of(family: str, folder: Path) -> Any:
    parts = {
        "image_processor": AutoImageProcessor.from_pretrained(folder, backend="pil"),
        "tokenizer": AutoTokenizer.from_pretrained(folder),
    }
    if family == "gemma3":
        return Gemma3Processor(**parts, image_seq_length=4)
    if family in (
        "smolvlm",
        "idefics3",
    ):  # SmolVLM's own needs a package for videos; its text is that of Idefics3
        return Idefics3Processor(**parts, image_seq_len=4)
    kind: Any = Qwen3VLProcessor if family == "qwen3_vl" else Qwen2_5_VLProcessor
    # Videos need torchvision, so there is no processor of videos to check.
    kind = type("WithoutVideos", (kind,), {"check_argument_for_proper_class": lambda *_: None})
    return kind(**parts)


def encode(processor: Any, row: dict[str, Any], folder: Path) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The inputs of a row by transformers' processor, and its labels."""
    turns = [
        {**turn, "content": [{"type": "text", "text": turn["content"]}]}
        if isinstance(turn["content"], str)
        else turn
        for turn in row["messages"]
    ]
    pictures = [Image.open(folder / part["path"]) for part in turns[0]["content"] if part["type"] == "image"]

    def read(shown: list[Any], **options: Any) -> Any:
        text = processor.tokenizer.apply_chat_template(shown, tokenize=False, **options)
        return processor(text=[text], images=pictures or None, return_tensors="pt", add_special_tokens=False)

    inputs = dict(read(turns))
    prompt = read(turns[:1], add_generation_prompt=True)["input_ids"].shape[1]
    labels = inputs["input_ids"][0].clone()
    labels[:prompt] = -100
    end = int((inputs["input_ids"][0] == processor.tokenizer.eos_token_id).nonzero()[-1])
    labels[end + 1 :] = -100
    return inputs, labels


def reference(
    family: str, folder: Path, rows: Path, *, targets: str = LANGUAGE, saved: str | None = None
) -> list[float]:
    """The losses of transformers and PEFT, one row at a time."""
    torch.manual_seed(3)
    config = LoraConfig(
        r=8, lora_alpha=16, target_modules=targets, modules_to_save=[saved] if saved else None
    )
    model = get_peft_model(AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32), config)
    start_adapter(model, seed=3)
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=OPTIONS["lr"], weight_decay=OPTIONS["wd"])
    processor = processor_of(family, folder)
    read = [json.loads(line) for line in rows.read_text().splitlines()]
    order = np.concatenate(
        [np.random.Generator(np.random.Philox(key=(3, epoch))).permutation(ROWS) for epoch in (0, 1)]
    )
    losses = []
    for step in range(NUM_STEPS):
        encoded = [encode(processor, read[row], rows.parent) for row in order[2 * step : 2 * step + 2]]
        weight = sum(int((labels[1:] != -100).sum()) for _, labels in encoded)
        total = 0.0
        for inputs, labels in encoded:
            logits = model(**inputs).logits[0]
            loss = torch.nn.functional.cross_entropy(logits[:-1], labels[1:], reduction="sum")
            (loss / weight).backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(trained, OPTIONS["grad_norm"])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total / weight)
    return losses


def run_of(folder: Path, model: Path, rows: Path, **options: Any) -> Path:
    asked = OPTIONS | {"max_steps": NUM_STEPS, "model_name": str(model), "dataset": str(rows)} | options
    return train(make_config(**asked, output_dir=str(folder), name="run")).folder


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=[SLOW] * (one in ("qwen3_vl", "idefics3"))) for one in FAMILIES]
)
def test_losses_equal_peft(tmp_path: Path, family: str) -> None:
    model, rows = tiny_vision(tmp_path / "model", family), write_rows(tmp_path)
    run = run_of(tmp_path, model, rows)
    assert column(run, "loss") == pytest.approx(reference(family, model, rows), rel=1e-5)
    opened = PeftModel.from_pretrained(
        AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32), run / "adapter"
    )
    trained = {name for name, p in opened.named_parameters() if "lora_B" in name and p.abs().max() > 0}
    assert trained
    assert not any("visual" in name or "vision" in name for name in trained)


@pytest.mark.slow
@pytest.mark.filterwarnings("error:Found missing adapter keys")
@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_tower_and_projector_train_where_asked(tmp_path: Path, family: str) -> None:
    model, rows = tiny_vision(tmp_path / "model", family), write_rows(tmp_path)
    run = run_of(tmp_path, model, rows, train_vision_tower=True, train_projector=True)
    expected = reference(family, model, rows, targets=f"{LANGUAGE}|{TOWER}", saved=PROJECTOR[family])
    assert column(run, "loss") == pytest.approx(expected, rel=1e-5)
    opened = PeftModel.from_pretrained(
        AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32), run / "adapter"
    )
    trained = {name for name, p in opened.named_parameters() if "lora_B" in name and p.abs().max() > 0}
    assert any(".visual." in name or ".vision_tower." in name for name in trained)
    assert any("modules_to_save" in name for name, _ in opened.named_parameters())


@pytest.mark.parametrize("family", ["qwen3_vl", pytest.param("smolvlm", marks=SLOW)])
def test_packed_runs_have_the_loss_of_separate_rows(tmp_path: Path, family: str) -> None:
    model, rows = tiny_vision(tmp_path / "model", family), write_rows(tmp_path)
    options = {"train_type": "lora", "max_steps": 1, "batch_size": 12, "context_length": 2048}
    separate = run_of(tmp_path / "separate", model, rows, **options)
    packed = run_of(tmp_path / "packed", model, rows, **options | {"packing": True, "batch_size": 1})
    for name in ("supervised_tokens", "loss", "grad_norm"):
        expected = column(separate, name, learns=False)
        assert column(packed, name, learns=False) == pytest.approx(expected, rel=1e-5)


def test_resumed_runs_are_the_same_to_the_last_bit(tmp_path: Path) -> None:
    model, rows = tiny_vision(tmp_path / "model", "qwen2_5_vl"), write_rows(tmp_path)
    whole = run_of(tmp_path / "whole", model, rows, save_steps=3)
    half = run_of(tmp_path / "half", model, rows, max_steps=5, save_steps=3)
    resumed = run_of(tmp_path / "half", model, rows, save_steps=3, resume=str(half))
    assert resumed == half
    assert column(resumed, "loss") == column(whole, "loss")
    assert column(resumed, "grad_norm") == column(whole, "grad_norm")
    weights = "adapter/adapter_model.safetensors"
    assert (resumed / weights).read_bytes() == (whole / weights).read_bytes()
