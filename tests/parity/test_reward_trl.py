"""Reward models: losses, gradients and weights equal those of TRL's RewardTrainer, on both engines, processes and resumes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks
from support import assert_close_after_adam, assert_same_gradients

import crosstune
from crosstune.cli.main import main
from crosstune.config.load import make_config
from crosstune.core.events import Observers
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.files.json_files import read_jsonl
from crosstune.planner.gather import make_plan
from crosstune.recipes.judge.rewards import RewardBatch
from crosstune.runs.open_parts import find_model, open_session
from crosstune.runs.open_recipe import open_recipe

STEPS, LR = 5, 1e-3


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs whose better answer is in its words, some with turns, some as text."""
    draw = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    for number in range(80):
        better, worse = f"a {draw.choice(['good', 'fine'])} text", f"a {draw.choice(['poor', 'bad'])} one"
        row: dict[str, Any] = {"prompt": f"Write text {number}.", "chosen": better, "rejected": worse}
        if number % 4 == 0:
            asked = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Yes?"}]
            row["prompt"] = [*asked, {"role": "user", "content": row["prompt"]}]
            for side in ("chosen", "rejected"):
                row[side] = [{"role": "assistant", "content": row[side]}]
        rows.append(row | {"margin": float(draw.uniform(0, 2))})
    path = tmp_path_factory.mktemp("rewards") / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def options(model: Path, pairs: Path, **more: Any) -> dict[str, Any]:
    asked = {"recipe": "judge", "head": "scalar", "model_name": str(model), "dataset": str(pairs), "wd": 0.0}
    asked |= {
        "backend": "cpu",
        "precision": "fp32",
        "train_type": "full",
        "batch_size": 4,
        "max_steps": STEPS,
    }
    asked |= {"gradient_accumulation_steps": 2, "lr": LR, "apply_gradient_clipping": False, "skip_eval": True}
    return asked | {"lora_dropout": 0.0} | more


def open_both(model: Path, pairs: Path, **more: Any) -> tuple[Any, Any]:
    plan = make_plan(make_config(**options(model, pairs, **more)))
    found = find_model(plan.config, Observers())
    recipe = open_recipe(plan.config, found, Observers())
    return recipe, open_session(plan, found, task=recipe.task(plan.engine))


def trl_inputs(batches: list[RewardBatch]) -> dict[str, torch.Tensor]:
    """Return the tokens of a step in TRL's layout: all better answers, then all worse ones."""
    rows = [
        batch.input_ids[row, : batch.ends[row] + 1] for batch in batches for row in range(len(batch.ends))
    ]
    rows = [*rows[::2], *rows[1::2]]
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    margins = torch.from_numpy(np.concatenate([batch.scores for batch in batches]))
    return {"input_ids": ids, "attention_mask": mask, "margin": margins}


@pytest.mark.parametrize("center", [0.0, 0.05])
def test_steps_are_those_of_trl(tiny_model: Path, pairs: Path, tmp_path: Path, center: float) -> None:
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    recipe, session = open_both(tiny_model, pairs, center_rewards=center)
    folder = session.save_result(tmp_path / "start")
    trainer = trl.RewardTrainer(
        model=AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32),
        args=trl.RewardConfig(
            output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[], gradient_checkpointing=False,
            center_rewards_coefficient=center or None,
        ),
        train_dataset=Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}]),
        processing_class=AutoTokenizer.from_pretrained(tiny_model),
    )  # fmt: skip
    model, mlx = trainer.model, open_both(tiny_model, pairs, center_rewards=center, backend="mlx")[1]
    assert model.config.pad_token_id == Tokenizer.from_folder(tiny_model).pad_id
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=LR, weight_decay=0.0)
    for step in range(STEPS):
        # Each step starts from the same weights: the loss does not change if all rewards do, and where a gradient is all
        # rounding, Adam still moves the weight by lr, either way.
        weights = session.export_state().weights
        mlx.import_weights(weights)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(torch.from_numpy(np.array(weights[name])))
        batches = recipe.micro_batches(step)
        found, other = (each.backward([each.prepare(batch) for batch in batches]) for each in (session, mlx))
        optimizer.zero_grad()
        expected = trainer.compute_loss(model, trl_inputs(batches))
        expected.backward()
        norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in model.parameters()]))
        assert_same_gradients(
            {name: parameter.grad for name, parameter in session.masters.masters.items()},
            {name: parameter.grad for name, parameter in model.named_parameters()},
        )
        for ours in (found, other):
            assert ours.loss == pytest.approx(expected.item(), rel=1e-5, abs=1e-5)
            assert ours.grad_norm == pytest.approx(norm.item(), rel=1e-5)
            for name in ("accuracy", "margin", "mean_reward"):
                logged = trainer._metrics["train"][name][-1]
                assert ours.metrics[name] == pytest.approx(logged, rel=1e-5, abs=1e-5), name
        for each in (session, mlx):
            each.update(lr=LR)
        optimizer.step()
    expected_weights = {name: array.detach().numpy() for name, array in model.named_parameters()}
    for each in (session, mlx):
        assert_close_after_adam(each.export_state().weights, expected_weights, lr=LR, num_steps=STEPS)


def train(home: Path, asked: dict[str, Any]) -> list[float]:
    run = crosstune.train(**asked, output_dir=str(home))
    return [line["loss"] for line in read_jsonl(run.folder / "metrics.jsonl")]


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
def test_a_resumed_run_is_the_same(tiny_model: Path, pairs: Path, tmp_path: Path, backend: str) -> None:
    asked = options(tiny_model, pairs, backend=backend, train_type="lora", lr=1e-2)
    whole = train(tmp_path, asked | {"name": "whole", "save_steps": 2})
    resumed = train(
        tmp_path,
        asked | {"name": "again", "resume": str(tmp_path / "whole" / "checkpoints" / "step-00000002")},
    )
    assert resumed == whole and len(set(whole)) == STEPS


@pytest.mark.slow
def test_two_processes_train_as_one(tiny_model: Path, pairs: Path, tmp_path: Path) -> None:
    asked = options(tiny_model, pairs, train_type="lora", lr=1e-2, center_rewards=0.01)
    one = train(tmp_path, asked | {"name": "one"})
    asked |= {"world_size": 2, "gradient_accumulation_steps": 1, "output_dir": str(tmp_path)}
    strategies = ("ddp", "full_shard")
    runs = [asked | {"name": strategy, "sharding_strategy": strategy} for strategy in strategies]
    run_ranks([{"world": 2, "host": 2, "runs": runs}])
    for strategy in strategies:
        losses = [line["loss"] for line in read_jsonl(tmp_path / strategy / "metrics.jsonl")]
        assert losses == pytest.approx(one, rel=1e-5, abs=1e-5), strategy


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
def test_a_reward_model_learns_and_transformers_gives_its_rewards(
    tiny_model: Path, pairs: Path, tmp_path: Path, backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    asked = options(tiny_model, pairs, backend=backend, lr=5e-3, max_steps=12, output_dir=tmp_path, name="r")
    asked |= {"skip_eval": False, "train_type": "lora", "lora_target_modules": "all"}
    words = [word for name, value in asked.items() if name != "recipe" for word in (f"--{name}", str(value))]
    assert main(["judge", "train", *words, "--skip_untrained", "--json"]) == 0
    said = capsys.readouterr()
    assert "the data has pairs, so the head learns rewards from 64 of them (Bradley-Terry)" in said.err
    test = json.loads(said.out)["test"]
    assert test["metrics"]["accuracy"] == 1.0 and test["metrics"]["margin"] > 1
    low, high = test["intervals"]["margin"]
    assert low < test["metrics"]["margin"] < high
    turns = [{"role": "user", "content": "Write."}, {"role": "assistant", "content": "a good text"}]
    rows = [
        {"task": "Write.", "answer": "a good text"},
        {"prompt": "Write.", "completion": "a bad one"},
        {"messages": turns},
        {"prompt": turns[:1], "completion": turns[1:]},
    ]
    (tmp_path / "new.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rewards = {}
    for engine in ("cpu", "mlx"):
        words = f"judge predict {tmp_path}/r --input {tmp_path}/new.jsonl --backend {engine} --json".split()
        assert main(words) == 0
        rewards[engine] = [row["predicted"] for row in json.loads(capsys.readouterr().out)]
    assert rewards["mlx"] == pytest.approx(rewards["cpu"], abs=1e-5)
    good, bad, *same = rewards["cpu"]
    assert good > bad + 1 and same == pytest.approx([good] * 2, abs=1e-5)
    folder = tmp_path / "r" / "model"
    model, info = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and model.num_labels == 1
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer.apply_chat_template(turns, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        assert float(model.eval()(**tokens).logits[0, 0]) == pytest.approx(good, abs=1e-5)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"balance_scores": True}, "balance_scores with rewards"),
        ({"train_type": "qlora"}, "a scalar head needs full or lora"),
        ({"dataset": "judge_translations", "center_rewards": 0.1}, "center_rewards with scores"),
    ],
)
def test_requests_that_a_reward_model_rejects(
    tiny_model: Path, pairs: Path, tmp_path: Path, asked: dict[str, Any], words: str
) -> None:
    with pytest.raises(crosstune.UserError, match=words):
        train(tmp_path, options(tiny_model, pairs) | asked)
    assert not list(tmp_path.iterdir())
