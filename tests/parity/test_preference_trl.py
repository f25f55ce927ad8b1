"""Losses, log probabilities, gradients and weights over ten steps equal those of TRL's trainers, on the same tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import assert_close_after_adam

from crosstune.config.load import make_config
from crosstune.core.events import Observers
from crosstune.data.batches.token_batch import pad_rows
from crosstune.planner.gather import make_plan
from crosstune.runs.open_parts import find_model, open_recipe, open_session

trl = pytest.importorskip("trl")
STEPS, LR, RANK = 10, 1e-3, 4
NAMES = {
    "dpo": "sigmoid", "ipo": "ipo", "hinge": "hinge", "robust": "robust", "apo_zero": "apo_zero", "apo_down": "apo_down",
    "nca": "nca_pair", "bco": "bco_pair", "sppo": "sppo_hard",
}  # fmt: skip
"""Our names of losses -> TRL's."""


def write_pairs(path: Path) -> Path:
    draw = np.random.default_rng(0)
    words = ["red", "green", "blue", "small", "large", "round", "quick", "slow", "warm", "cold"]
    rows = []
    for number in range(24):
        better, worse = (" ".join(draw.choice(words, draw.integers(2, 9))) for _ in range(2))
        rows.append(
            {"prompt": f"Describe thing {number}.", "chosen": better, "rejected": f"{worse} {number}"}
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def open_ours(folder: Path, loss: str, **options: Any) -> tuple[Any, Any]:
    config = make_config(
        recipe="preference", model_name="tiny-random", dataset=str(write_pairs(folder / "pairs.jsonl")), batch_size=4,
        lora_rank=RANK, backend="cpu", precision="fp32", skip_eval=True, max_steps=STEPS, preference_loss=loss,
        apply_gradient_clipping=False, wd=0.0, num_epochs=4, **options,
    )  # fmt: skip
    plan = make_plan(config)
    model = find_model(config, Observers())
    recipe = open_recipe(plan.config, model, Observers())
    recipe.configure(plan.config)
    return recipe, open_session(plan, model, task=recipe.task(plan.engine))


def trl_inputs(recipe: Any, step: int) -> dict[str, torch.Tensor]:
    """Return the tokens of a step in TRL's layout: all chosen rows, then all rejected rows."""
    groups = [recipe.train[place] for place in recipe.rows(step)]
    rows = [group.examples[side] for side in range(2) for group in groups]
    batch = pad_rows(rows, pad_id=0)
    marks = np.zeros(batch.input_ids.shape, dtype=np.int64)
    for number, row in enumerate(rows):
        marks[number, : len(row.tokens)] = row.supervised
    return {
        "input_ids": torch.from_numpy(batch.input_ids.astype(np.int64)),
        "attention_mask": torch.from_numpy((batch.segments > 0).astype(np.int64)),
        "completion_mask": torch.from_numpy(marks),
    }


def open_trl(folder: Path, session: Any, **options: Any) -> Any:
    """Return TRL's trainer with the base and the new adapter of a session."""
    from datasets import Dataset
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    adapter, base = session.save_result(folder / "start"), session.context.folder
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return trl.DPOTrainer(
        model=PeftModel.from_pretrained(model, adapter, is_trainable=True),
        args=trl.DPOConfig(
            output_dir=str(folder / "trl"), use_cpu=True, bf16=False, report_to=[], gradient_checkpointing=False,
            **options,
        ),
        train_dataset=Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}]),
        processing_class=AutoTokenizer.from_pretrained(base),
    )  # fmt: skip


@pytest.mark.parametrize(
    "loss",
    [name if name in ("dpo", "ipo") else pytest.param(name, marks=pytest.mark.slow) for name in NAMES],
)
def test_ten_steps(loss: str, tmp_path: Path) -> None:
    smoothing = 0.1 if loss == "robust" else 0.0
    recipe, session = open_ours(tmp_path, loss, label_smoothing=smoothing)
    trainer = open_trl(tmp_path, session, loss_type=[NAMES[loss]], label_smoothing=smoothing)
    model = trainer.model
    trained = {
        name.removeprefix("base_model.model.").replace(".default", ""): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    optimizer = torch.optim.AdamW(trained.values(), lr=LR, weight_decay=0.0)
    for step in range(STEPS):
        found = session.backward([session.prepare(batch) for batch in recipe.micro_batches(step)])
        optimizer.zero_grad()
        expected = trainer._compute_loss(model, trl_inputs(recipe, step), return_outputs=False)
        expected.backward()
        norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in trained.values()]))
        assert found.loss == pytest.approx(expected.item(), rel=1e-5, abs=1e-5)
        assert found.grad_norm == pytest.approx(norm.item(), rel=1e-4)
        for name in (
            "rewards/chosen",
            "rewards/rejected",
            "rewards/margins",
            "logps/chosen",
            "logps/rejected",
            "entropy",
        ):
            logged = trainer._metrics["train"][name][-1]
            assert found.metrics[name] == pytest.approx(logged, rel=1e-5, abs=2e-5), name
        session.update(lr=LR)
        optimizer.step()
    weights = session.export_state().weights
    assert weights.keys() == trained.keys()
    assert_close_after_adam(
        weights,
        {name: parameter.detach().numpy() for name, parameter in trained.items()},
        lr=LR,
        num_steps=STEPS,
    )
