"""Recomputation in vision-language models: the same gradients, and none through a frozen tower."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from planned import plan_on
from test_vision_rows import corpus_of, row_of
from vision_models import FAMILIES, draw, tiny_vision

from crosstune.core.errors import UserError
from crosstune.data.batches.token_batch import pad_rows
from crosstune.estimate.vision import family_of, is_tower
from crosstune.torch_engine.open import open_session
from crosstune.torch_engine.tasks.vision_lm import VisionLM


def gradients(folder: Path, examples: Any, **options: Any) -> tuple[dict[str, torch.Tensor], set[bool]]:
    """Return the gradients of a batch, and whether outputs of the tower's layers have gradients."""
    plan = plan_on(
        "cpu-laptop",
        model_name=str(folder),
        train_type="lora",
        backend="cpu",
        precision="fp32",
        seed=1,
        **options,
    )
    session: Any = open_session(plan, model_folder=folder, task=VisionLM())
    family, found = family_of(session.model), set[bool]()
    for name, module in session.model.named_modules():
        if is_tower(name, family) and not list(module.children()):
            module.register_forward_hook(
                lambda _, __, out: found.add(isinstance(out, torch.Tensor) and out.requires_grad)
            )
    arrays = session.task.arrays(pad_rows(examples, pad_id=0))
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    loss, _ = session.task.loss(session.model, tensors)
    loss.backward()
    return {name: p.grad for name, p in session.model.named_parameters() if p.grad is not None}, found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tower", [False, True])
def test_gradients_are_the_same_and_stop_before_a_frozen_tower(
    tmp_path: Path, family: str, tower: bool
) -> None:
    draw(tmp_path, "a.png", "red")
    examples = list(corpus_of(tmp_path, [row_of("a.png", "one")], family=family))
    folder = tiny_vision(tmp_path / "model", family)
    kept, _ = gradients(folder, examples, train_vision_tower=tower)
    again, in_tower = gradients(folder, examples, train_vision_tower=tower, use_gradient_checkpointing=True)
    assert kept.keys() == again.keys() and all(torch.equal(kept[name], again[name]) for name in kept)
    assert (True in in_tower) == tower


def test_no_blocks_are_added(tmp_path: Path) -> None:
    folder = tiny_vision(tmp_path / "model", "gemma3")
    plan = plan_on("cpu-laptop", model_name=str(folder), train_type="llama_pro", backend="cpu")
    with pytest.raises(UserError, match="llama_pro does not work with gemma3"):
        open_session(plan, model_folder=folder, task=VisionLM())
