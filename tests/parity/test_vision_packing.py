"""In packed rows with pictures, a document has the loss and gradients that it has alone, and no other document changes it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support import assert_same_gradients
from transformers import AutoModelForImageTextToText
from vision_models import FAMILIES, draw, tiny_vision, write_rows

from crosstune.data.batches.token_batch import Example, TokenBatch, pack_rows, pad_rows
from crosstune.data.read.sources import open_source
from crosstune.data.tokens.corpus import open_corpus
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.estimate.vision import Vision, read_vision
from crosstune.torch_engine.tasks.model_input import ModelInput
from crosstune.torch_engine.tasks.vision_lm import VisionLM, open_processor


def task_of(folder: Path) -> VisionLM:
    task, vision = VisionLM(), read_vision(folder)
    assert isinstance(vision, Vision)
    task.vision, task.processor = vision, open_processor(folder)
    return task


def examples_of(rows: Path, model: Path) -> list[Example]:
    corpus = open_corpus(
        open_source(str(rows)),
        Tokenizer.from_folder(model).with_vision(model, pixels=None),
        asked_format="auto",
        whole=False,
        context_length=2048,
        truncation="error",
    )
    return list(corpus)


def tensors_of(task: VisionLM, batch: TokenBatch) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in task.arrays(batch).items()}


def token_losses(task: VisionLM, model: Any, batch: TokenBatch) -> torch.Tensor:
    with torch.no_grad():
        return task.token_losses(model, ModelInput.of(tensors_of(task, batch)))[0]


def recoloured(rows: Path, number: int) -> Path:
    """The rows with another picture of the same size and another answer of the same length in one of them."""
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    first = found[number]["messages"][0]["content"][0]
    with Image.open(rows.parent / first["path"]) as picture:
        size = picture.size
    first["path"] = draw(rows.parent, "other.png", "yellow", size=size)
    path = rows.with_name("other.jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_document_is_as_alone(tmp_path: Path, family: str) -> None:
    folder, rows = tiny_vision(tmp_path / "model", family), write_rows(tmp_path, count=5)
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).train()
    task, examples = task_of(folder), examples_of(rows, folder)
    packed = pack_rows([examples[:3], examples[3:]], pad_id=0)

    def gradients(batches: Sequence[TokenBatch]) -> tuple[float, dict[str, torch.Tensor]]:
        model.zero_grad()
        total = 0.0
        for batch in batches:
            loss = task.loss(model, tensors_of(task, batch))[0]
            loss.backward()
            total += loss.item()
        return total, {
            name: p.grad.clone()
            for name, p in model.named_parameters()
            if p.grad is not None and not name.endswith("k_proj.bias")  # 0 but for rounding
        }

    alone_loss, alone = gradients([pad_rows([example], pad_id=0) for example in examples])
    packed_loss, together = gradients([packed])
    assert packed_loss == pytest.approx(alone_loss, rel=1e-5)
    assert_same_gradients(together, alone)
    losses = token_losses(task, model, packed)
    each = [token_losses(task, model, pad_rows([example], pad_id=0)) for example in examples]
    torch.testing.assert_close(losses, torch.cat(each), rtol=1e-5, atol=1e-5)

    changed = list(examples)
    changed[0] = examples_of(recoloured(rows, 0), folder)[0]
    assert changed[0].pictures[0].sha256 != examples[0].pictures[0].sha256
    other = token_losses(task, model, pack_rows([changed[:3], changed[3:]], pad_id=0))
    own = len(each[0])
    assert not torch.equal(losses[:own], other[:own])
    assert torch.equal(losses[own:], other[own:])


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_positions_are_those_of_the_model(tmp_path: Path, family: str) -> None:
    folder, rows = tiny_vision(tmp_path / "model", family), write_rows(tmp_path)
    model: Any = AutoModelForImageTextToText.from_pretrained(folder)
    task, examples = task_of(folder), examples_of(rows, folder)
    for batch in (pad_rows(examples[:4], pad_id=0), pack_rows([examples[4:8], examples[8:]], pad_id=0)):
        found = tensors_of(task, batch)["grid_positions"]
        assert (found[0] == torch.from_numpy(batch.positions)).all()
        pictures = iter(tensors_of(task, batch)["image_grid_thw"])
        for row, segments in enumerate(batch.segments):
            for segment in range(1, segments.max() + 1):
                here = np.flatnonzero(segments == segment)
                own = replace(
                    batch,
                    input_ids=batch.input_ids[row : row + 1, here],
                    targets=batch.targets[row : row + 1, here],
                )
                marks = torch.from_numpy((own.input_ids == task.vision.soft_id).astype("int64"))
                starts = int(((marks[0, 1:] == 1) & (marks[0, :-1] == 0)).sum())
                grids = torch.stack([next(pictures) for _ in range(starts)]) if starts else None
                expected = model.model.get_rope_index(torch.from_numpy(own.input_ids), marks, grids)[0]
                assert torch.equal(found[1:, row, here], expected[:, 0])
