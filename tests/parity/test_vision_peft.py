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
from vision_models import tiny_vision, write_rows

from crosstune.config.load import make_config
from crosstune.runs.pipeline import train

NUM_STEPS, ROWS = 8, 12
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
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "gemma3", "smolvlm")


def processor_of(family: str, folder: Path) -> Any:
    parts = {
        "image_processor": AutoImageProcessor.from_pretrained(folder, backend="pil"),
        "tokenizer": AutoTokenizer.from_pretrained(folder),
    }
    if family == "gemma3":
        return Gemma3Processor(**parts, image_seq_length=4)
    if family == "smolvlm":  # SmolVLM's own needs a package for videos; its text is that of Idefics3
        return Idefics3Processor(**parts, image_seq_len=4)
    kind: Any = Qwen2_5_VLProcessor if family == "qwen2_5_vl" else Qwen3VLProcessor
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


def reference(family: str, folder: Path, rows: Path, *, targets: str = LANGUAGE) -> list[float]:
    """The losses of transformers and PEFT, one row at a time."""
    torch.manual_seed(3)
    config = LoraConfig(r=8, lora_alpha=16, target_modules=targets)
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


@pytest.mark.parametrize("family", FAMILIES)
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
