"""Losses, log probabilities, gradients and weights over ten steps equal those of TRL's trainers, on the same tokens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import assert_close_after_adam, assert_same_gradients, tiny_of

from crosstune.config.load import make_config
from crosstune.core.events import Observers
from crosstune.data.batches.token_batch import Example, pad_rows
from crosstune.planner.gather import make_plan
from crosstune.runs.open_parts import find_model, open_session
from crosstune.runs.open_recipe import open_recipe

trl = pytest.importorskip("trl")
STEPS, LR, RANK = 10, 1e-3, 4
DPO_NAMES = {
    "dpo": "sigmoid", "ipo": "ipo", "hinge": "hinge", "robust": "robust", "apo_zero": "apo_zero", "apo_down": "apo_down",
    "nca": "nca_pair", "bco": "bco_pair", "sppo": "sppo_hard",
}  # fmt: skip
"""Our names of losses -> TRL's."""
LOSSES: Mapping[str, dict[str, Any]] = {
    **{name: {} for name in DPO_NAMES},
    "robust": {"label_smoothing": 0.1},
    "kto": {"desirable_weight": 1.3, "undesirable_weight": 0.7},
    "orpo": {},
    "cpo": {"label_smoothing": 0.1},
    "simpo": {},
}
"""Our losses -> options. Unset: the defaults."""
Inputs = dict[str, torch.Tensor]


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


def open_ours(model: Path, pairs: Path, loss: str, **options: Any) -> tuple[Any, Any]:
    config = make_config(
        recipe="preference", model_name=str(model), dataset=str(pairs), batch_size=4, lora_rank=RANK, backend="cpu",
        precision="fp32", skip_eval=True, max_steps=STEPS, preference_loss=loss, apply_gradient_clipping=False, wd=0.0,
        num_epochs=4, **options,
    )  # fmt: skip
    plan = make_plan(config)
    found = find_model(config, Observers())
    recipe = open_recipe(plan.config, found, Observers())
    recipe.configure(plan.config)
    return recipe, open_session(plan, found, task=recipe.task(plan.engine))


def padded(rows: list[Example]) -> Inputs:
    """Return tokens in TRL's layout."""
    batch = pad_rows(rows, pad_id=0)
    marks = np.zeros(batch.input_ids.shape, dtype=np.int64)
    for number, row in enumerate(rows):
        marks[number, : len(row.tokens)] = row.supervised
    return {
        "input_ids": torch.from_numpy(batch.input_ids.astype(np.int64)),
        "attention_mask": torch.from_numpy((batch.segments > 0).astype(np.int64)),
        "completion_mask": torch.from_numpy(marks),
    }


class Theirs:
    """TRL's trainers, each with the base and the first adapter of our session."""

    def __init__(self, folder: Path, session: Any) -> None:
        self.folder, self.base = folder, session.context.folder
        self.adapter = session.save_result(folder / "start")
        self._made: dict[str, Any] = {}
        self._start: dict[str, dict[str, torch.Tensor]] = {}

    def trainer(self, kind: str) -> Any:
        """Return DPOTrainer, KTOTrainer, ORPOTrainer or CPOTrainer with the weights from before the training."""
        from datasets import Dataset
        from peft import PeftModel
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from trl.experimental import cpo, orpo

        if kind not in self._made:
            place = {"ORPO": orpo, "CPO": cpo}.get(kind, trl)
            model = AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.float32)
            rows = [{"prompt": "a", "chosen": "b", "rejected": "c"}]
            if kind == "KTO":
                rows = [{"prompt": "a", "completion": f"b{n}", "label": bool(n % 2)} for n in range(8)]
            trainer = getattr(place, f"{kind}Trainer")(
                model=PeftModel.from_pretrained(model, self.adapter, is_trainable=True),
                args=getattr(place, f"{kind}Config")(
                    output_dir=str(self.folder / kind), use_cpu=True, bf16=False, report_to=[],
                    gradient_checkpointing=False,
                ),
                train_dataset=Dataset.from_list(rows),
                processing_class=AutoTokenizer.from_pretrained(self.base),
            )  # fmt: skip
            self._made[kind] = trainer
            self._start[kind] = {n: p.detach().clone() for n, p in trained_of(trainer.model).items()}
        trainer = self._made[kind]
        with torch.no_grad():
            for name, parameter in trained_of(trainer.model).items():
                parameter.copy_(self._start[kind][name])
        trainer.model.train()
        return trainer


def trained_of(model: Any) -> dict[str, torch.nn.Parameter]:
    return {
        name.removeprefix("base_model.model.").replace(".default", ""): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


Compute = Callable[[Any, int], tuple[torch.Tensor, dict[str, float]]]
"""(recipe, step): TRL's loss and metrics."""


def make_compute(theirs: Theirs, loss: str, given: Mapping[str, Any]) -> tuple[Any, Compute]:
    """Return TRL's model, and its loss of a step of our recipe."""
    smoothing = given.get("label_smoothing", 0.0)
    if loss in DPO_NAMES:
        trainer = theirs.trainer("DPO")
        trainer.loss_types, trainer.label_smoothing = [DPO_NAMES[loss]], smoothing

        def compute(recipe: Any, step: int) -> tuple[torch.Tensor, dict[str, float]]:
            groups = [recipe.train[place] for place in recipe.rows(step)]
            inputs = padded([group.examples[side] for side in range(2) for group in groups])
            total = trainer._compute_loss(trainer.model, inputs, return_outputs=False)
            return total, {name: found[-1] for name, found in trainer._metrics["train"].items() if found}

        return trainer.model, compute
    if loss == "kto":
        trainer = theirs.trainer("KTO")
        for name, value in given.items():
            setattr(trainer, name, value)

        def compute(recipe: Any, step: int) -> tuple[torch.Tensor, dict[str, float]]:
            groups = [recipe.train[place] for place in recipe.rows(step)]
            others = {f"KL_{k}": v for k, v in padded([group.other for group in groups]).items()}
            inputs = padded([group.examples[0] for group in groups]) | others
            inputs["label"] = torch.tensor([group.is_desirable for group in groups])
            trainer._metrics["train"].clear()
            total = trainer._compute_loss(trainer.model, inputs, return_outputs=False)
            return total, {name: found[-1] for name, found in trainer._metrics["train"].items() if found}

        return trainer.model, compute
    trainer = theirs.trainer("ORPO" if loss == "orpo" else "CPO")
    if loss != "orpo":
        trainer.loss_type = "simpo" if loss == "simpo" else "sigmoid"
        trainer.cpo_alpha = 0.0 if loss == "simpo" else 1.0
        trainer.beta = 2.0 if loss == "simpo" else 0.1
        trainer.label_smoothing, trainer.simpo_gamma = smoothing, trainer.args.simpo_gamma

    def compute(recipe: Any, step: int) -> tuple[torch.Tensor, dict[str, float]]:
        groups = [recipe.train[place] for place in recipe.rows(step)]
        inputs: Inputs = {}
        for side, name in enumerate(("chosen", "rejected")):
            rows = padded([group.examples[side] for group in groups])
            rows["labels"] = rows["input_ids"].masked_fill(rows.pop("completion_mask") == 0, -100)
            inputs |= {f"{name}_{key}": value for key, value in rows.items()}
        if loss != "orpo":
            total, metrics = trainer.get_batch_loss_metrics(trainer.model, inputs)
            return total, metrics if loss == "cpo" else {}  # TRL's are means over tokens for simpo
        # The paper's likelihood is that of the answer; TRL's covers the prompt too.
        chosen, rejected, logits, *_ = trainer.concatenated_forward(trainer.model, inputs)
        labels = inputs["chosen_labels"][:, 1:]
        nll = torch.nn.functional.cross_entropy(logits[:, : labels.shape[1]].transpose(1, 2), labels)
        return nll - trainer.odds_ratio_loss(chosen, rejected)[0].mean(), {"sft_loss": nll.item()}

    return trainer.model, compute


SLOW = {"llama": STEPS, "qwen3": 3, "gemma2": 3, "phi3": 3}


@pytest.mark.parametrize(
    ("family", "steps"),
    [("llama", 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW.items())],
)
def test_steps_of_every_loss(family: str, steps: int, tiny_model: Path, tmp_path: Path) -> None:
    vocab = json.loads((tiny_model / "config.json").read_text())["vocab_size"]
    model = tiny_of(family, tmp_path / family, vocab)
    for path in (*tiny_model.glob("*token*"), *tiny_model.glob("*.jinja")):
        shutil.copy(path, model / path.name)
    pairs, theirs = write_pairs(tmp_path / "pairs.jsonl"), None
    for loss, given in LOSSES.items():
        recipe, session = open_ours(model, pairs, loss, **given)
        theirs = theirs or Theirs(tmp_path, session)
        other, compute = make_compute(theirs, loss, given)
        trained = trained_of(other)
        optimizer = torch.optim.AdamW(trained.values(), lr=LR, weight_decay=0.0)
        for step in range(steps):
            found = session.backward([session.prepare(batch) for batch in recipe.micro_batches(step)])
            optimizer.zero_grad()
            expected, metrics = compute(recipe, step)
            expected.backward()
            norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in trained.values()]))
            at = f"{loss}, step {step}"
            assert found.loss == pytest.approx(expected.item(), rel=1e-5, abs=1e-5), at
            assert found.grad_norm == pytest.approx(norm.item(), rel=1e-4), at
            shared = [name for name in found.metrics if name in metrics and name != "rewards/accuracies"]
            assert shared or loss == "simpo"
            for name in shared:
                assert found.metrics[name] == pytest.approx(metrics[name], rel=1e-5, abs=2e-5), (
                    f"{at}: {name}"
                )
            if step == 0:
                gradients = {name: parameter.grad for name, parameter in session.masters.masters.items()}
                wanted = {name: parameter.grad for name, parameter in trained.items()}
                nonzero = {name for name, array in wanted.items() if array.abs().max() > 0}
                assert_same_gradients({n: gradients[n] for n in nonzero}, {n: wanted[n] for n in nonzero})
            session.update(lr=LR)
            optimizer.step()
        weights = session.export_state().weights
        assert_close_after_adam(
            weights,
            {name: parameter.detach().numpy() for name, parameter in trained.items()},
            lr=LR,
            num_steps=steps,
        )
