"""Runs of the preference recipe: the reference is the initial model, also after a resume and on the other engine."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import tiny_of

import crosstune
from crosstune.checkpoint.tensors import read_tensors, write_tensors
from crosstune.config.load import make_config
from crosstune.core.errors import UserError
from crosstune.core.events import Observers
from crosstune.data.batches.forked import ForkedBatch
from crosstune.planner.gather import make_plan
from crosstune.recipes.preference.open_pairs import make_batch
from crosstune.runs.open_parts import find_model, open_session
from crosstune.runs.open_recipe import open_recipe


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    rows = [
        {
            "prompt": f"What is {number} plus one?",
            "chosen": f"It is {number + 1}.",
            "rejected": f"{number} is a number that I like, but I do not know.",
        }
        for number in range(30)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def train(pairs: Path, home: Path, **options: Any) -> list[float]:
    """Train, and return the losses of all steps."""
    asked = {
        "recipe": "preference", "model_name": "tiny-random", "dataset": str(pairs), "batch_size": 2, "lr": 1e-3,
        "gradient_accumulation_steps": 1, "lora_rank": 4, "backend": "cpu", "precision": "fp32", "skip_eval": True,
        "max_steps": 4, "output_dir": str(home), "name": "run",
    }  # fmt: skip
    run = crosstune.train(**{**asked, **options})
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.fixture(scope="module")
def tuned(pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of supervised fine-tuning."""
    home = tmp_path_factory.mktemp("sft")
    train(pairs, home, recipe="sft", columns="chosen=completion", lr=1e-2)
    return home / "run" / "adapter"


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
def test_after_supervised_fine_tuning_the_reference_is_the_tuned_model(
    pairs: Path, tuned: Path, tmp_path: Path, backend: str
) -> None:
    options: dict[str, Any] = {"base_adapter": str(tuned), "backend": backend, "max_steps": 3}
    losses = train(pairs, tmp_path, save_steps=1, **options)
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6) and losses[2] < losses[0]
    # A resumed run has the adapter from its own folder, whatever became of the original.
    moved = tuned.rename(tuned.with_name("gone"))
    try:
        resumed = train(
            pairs, tmp_path, resume=str(tmp_path / "run" / "checkpoints" / "step-00000001"), name="again", max_steps=3,
            recipe="preference", backend=backend,
        )  # fmt: skip
    finally:
        moved.rename(tuned)
    assert resumed == losses


def open_both(pairs: Path, **more: Any) -> tuple[Any, Any]:
    """Return the recipe and an opened session."""
    asked: dict[str, Any] = {
        "recipe": "preference", "model_name": "tiny-random", "dataset": str(pairs), "lora_rank": 4, "backend": "cpu",
        "precision": "fp32", "batch_size": 4, "skip_eval": True,
    }  # fmt: skip
    config = make_config(**{**asked, **more})
    plan = make_plan(config)
    model = find_model(config, Observers())
    recipe = open_recipe(plan.config, model, Observers())
    recipe.configure(plan.config)
    return recipe, open_session(plan, model, task=recipe.task(plan.engine))


def test_with_the_bare_base_as_reference_the_first_loss_is_another(pairs: Path, tuned: Path) -> None:
    recipe, bare = open_both(pairs)
    [batch] = recipe.micro_batches(0)
    [of_base] = bare.task.answer_log_probs(bare, [batch])
    _, session = open_both(pairs, base_adapter=str(tuned))
    assert session.evaluate([batch]).loss == pytest.approx(math.log(2), abs=1e-6)
    wrong = session.evaluate([replace(batch, reference=of_base)])
    assert abs(wrong.loss - math.log(2)) > 0.01 and abs(wrong.metrics["rewards/margins"]) > 0.01


@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_a_precomputed_reference_is_the_same(pairs: Path, tmp_path: Path, loss: str) -> None:
    online = train(pairs, tmp_path, preference_loss=loss)
    stored = train(pairs, tmp_path, preference_loss=loss, reference="precomputed", name="stored")
    np.testing.assert_allclose(stored, online, rtol=1e-5)
    assert (tmp_path / "stored" / "reference.safetensors").is_file()
    resumed = train(
        pairs,
        tmp_path,
        preference_loss=loss,
        reference="precomputed",
        name="stored",
        resume="auto",
        max_steps=6,
    )
    assert resumed[:4] == stored and len(resumed) == 6
    if loss == "dpo":
        other: dict[str, Any] = {"preference_loss": "ipo", "name": "stored", "resume": "auto", "max_steps": 7}
        with pytest.raises(
            UserError, match=r"does not match the checkpoint(?s:.*)objective: dpo 1.0 .* ipo 1.0"
        ):
            train(pairs, tmp_path, reference="precomputed", **other)
        other["allow_mismatch"] = "objective"
        assert len(train(pairs, tmp_path, reference="precomputed", **other)) == 7


def test_a_reference_of_other_data_is_computed_again_and_a_damaged_one_rejected(
    pairs: Path, tmp_path: Path
) -> None:
    asked: dict[str, Any] = {"reference": "precomputed", "save_steps": 1, "keep_last_n": 9}
    straight = train(pairs, tmp_path, max_steps=3, **asked)
    stored = tmp_path / "run" / "reference.safetensors"
    whole, arrays = stored.read_bytes(), {name: np.array(a) for name, a in read_tensors(stored).items()}
    first = str(tmp_path / "run" / "checkpoints" / "step-00000001")

    def resume(changed: dict[str, Any] | bytes, name: str) -> list[float]:
        stored.unlink()
        if isinstance(changed, bytes):
            stored.write_bytes(changed)
        else:
            write_tensors(stored, changed)
        return train(pairs, tmp_path, max_steps=3, resume=first, name=name, **asked)

    other = resume(arrays | {"train.identity": np.zeros_like(arrays["train.identity"])}, "other")
    events = (tmp_path / "other" / "events.jsonl").read_text()
    assert other == straight and "is computed again" in events
    assert (tmp_path / "other" / "reference.safetensors").read_bytes() == whole
    half = arrays | {"train": np.where(np.arange(len(arrays["train"]))[:, None] < 7, arrays["train"], np.nan)}
    old = {name: a[: -65 if name.endswith(".identity") else None] for name, a in half.items()}
    assert resume(old, "half") == straight  # without a hash of the numbers, and the rest not computed yet
    assert (tmp_path / "half" / "reference.safetensors").read_bytes() == whole
    flipped = bytearray(whole)
    flipped[-9] ^= 1
    damaged: list[dict[str, Any] | bytes] = [
        whole[:-1], whole[:40], b"", b"\xff" * 300, bytes(flipped), arrays | {"train": arrays["train"][:-1]},
        arrays | {"train": arrays["train"].astype(np.float64)}, arrays | {"train": half["train"]},
        {name: a for name, a in arrays.items() if name != "train"},
    ]  # fmt: skip
    for number, changed in enumerate(damaged):
        with pytest.raises(UserError, match=r"reference\.safetensors"):
            resume(changed, f"damaged{number}")


def test_full_fine_tuning_precomputes(pairs: Path, tmp_path: Path) -> None:
    losses = train(pairs, tmp_path, train_type="full", lr=1e-4)
    assert losses[0] == pytest.approx(math.log(2), abs=1e-5) and losses[-1] < losses[0]
    assert (tmp_path / "run" / "reference.safetensors").is_file()


def test_both_engines_and_both_layouts_agree(pairs: Path, tmp_path: Path) -> None:
    found = [
        train(pairs, tmp_path, name=f"run{number}", **options)
        for number, options in enumerate(
            ({}, {"share_prompts": False}, {"backend": "mlx"}, {"kernels": "fast"}), start=1
        )
    ]
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], atol=1e-5)


def test_experts_with_adapters_have_a_fixed_reference(pairs: Path, tiny_model: Path, tmp_path: Path) -> None:
    """With new adapters, and with adapters of supervised fine-tuning."""
    vocab = json.loads((tiny_model / "config.json").read_text())["vocab_size"]
    model = tiny_of("mixtral", tmp_path / "mixtral", vocab)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny_model / name, model / name)
    train(pairs, tmp_path, recipe="sft", columns="chosen=completion", lr=1e-2, model_name=str(model))
    starts = []
    for more in ({}, {"base_adapter": str(tmp_path / "run" / "adapter")}):
        recipe, session = open_both(pairs, model_name=str(model), **more)
        assert any("experts" in name for name in session.masters.masters), "the experts are trained"
        window = [session.prepare(batch) for batch in recipe.micro_batches(0)]
        [start] = session.task.answer_log_probs(session, recipe.micro_batches(0))
        losses = []
        for _ in range(3):
            losses.append(session.backward(window).loss)
            session.update(lr=1e-2)
        assert losses[0] == pytest.approx(math.log(2), abs=1e-6) and losses[2] < losses[1] < losses[0]
        [trained] = session.task.answer_log_probs(session, recipe.micro_batches(0))
        with session.task.as_reference(session.model):
            [reference] = session.task.answer_log_probs(session, recipe.micro_batches(0))
        np.testing.assert_array_equal(reference, start)
        assert np.abs(trained - start).max() > 0.1
        starts.append(start)
    assert np.abs(starts[0] - starts[1]).max() > 0.1, "the reference of the second run is the tuned model"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kernels": "fast"},
        {"backend": "mlx"},
        {"share_prompts": False},
        {"preference_loss": "dpo:0.5,sft:1", "gradient_accumulation_steps": 2},
    ],
    ids=str,
)
def test_packed_pairs_train_like_separate_rows(pairs: Path, tuned: Path, options: dict[str, Any]) -> None:
    """The step is far from the reference, so that every pair has a gradient of its own."""
    recipe, session = open_both(
        pairs, packing=True, context_length=192, batch_size=2, base_adapter=str(tuned), lr=1e-2, **options
    )
    session.backward([session.prepare(batch) for batch in recipe.micro_batches(0)])
    session.update(lr=1e-2)
    places = [place for row in recipe._order().rows(1) for place in row]
    packed = recipe.micro_batches(1)
    assert max(batch.tokens.segments.max() for batch in packed) > 1
    assert sum(batch.weight for batch in packed) == len(places) > sum(len(b.tokens.segments) for b in packed)
    apart = [recipe.batch(recipe.train, [[place] for place in places])]
    expected = session.backward([session.prepare(batch) for batch in apart])
    session.update(lr=0.0)  # forgets the gradients, keeps the weights
    found = session.backward([session.prepare(batch) for batch in packed])
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
    for name, value in expected.metrics.items():
        assert found.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


@pytest.mark.cuda
@pytest.mark.parametrize(
    "options",
    [{}, {"packing": True, "context_length": 192}, {"use_gradient_checkpointing": True}],
    ids=str,
)
def test_a_gpu_shares_prompts_like_separate_rows(pairs: Path, options: dict[str, Any]) -> None:
    """Branches attend through torch's kernel for sequences of queries and keys; in bf16 the difference is rounding."""
    asked: dict[str, Any] = {"backend": "cuda", "precision": "bf16", "kernels": "fast"}
    recipe, session = open_both(pairs, **asked | options)
    assert session.task.decoder is not None and session.task.decoder.drops_padding
    first = session.evaluate(recipe.micro_batches(0))
    assert first.loss == pytest.approx(math.log(2), abs=1e-4)
    for step in range(2):
        session.backward([session.prepare(batch) for batch in recipe.micro_batches(step)])
        session.update(lr=1e-2)
    shared = recipe.micro_batches(2)
    assert all(isinstance(batch.tokens, ForkedBatch) for batch in shared)
    places = [place for row in recipe._order().rows(2) for place in row]
    apart = make_batch(
        [[recipe.train[place]] for place in places],
        pad_id=recipe.tokenizer.pad_id,
        shares_prompts=False,
        mean_chosen=shared[0].mean_chosen,
    )
    [expected_log_probs] = session.task.answer_log_probs(session, [apart])
    log_probs = np.concatenate(session.task.answer_log_probs(session, shared))
    assert np.abs(log_probs - expected_log_probs).max() < 0.01 * apart.lengths.max()
    expected = session.backward([session.prepare(apart)])
    session.update(lr=0.0)  # forgets the gradients, keeps the weights
    found = session.backward([session.prepare(batch) for batch in shared])
    assert abs(expected.metrics["rewards/margins"]) > 0.1, "the model has left its reference"
    assert found.loss == pytest.approx(expected.loss, abs=2e-2)
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=5e-2)


def test_a_packed_run_resumes(pairs: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"packing": True, "context_length": 192, "num_epochs": 4, "save_steps": 2}
    whole = train(pairs, tmp_path, **options)
    assert whole[0] == pytest.approx(math.log(2), abs=1e-6) and whole[-1] < whole[0]
    step = tmp_path / "run" / "checkpoints" / "step-00000002"
    assert train(pairs, tmp_path, resume=str(step), name="again", **options) == whole
    with pytest.raises(UserError, match="cannot be combined with preference_loss kto"):
        train(pairs, tmp_path, name="kto", preference_loss="kto", **options)


def test_evaluation_has_the_metrics_of_pairs(pairs: Path, tmp_path: Path) -> None:
    train(
        pairs,
        tmp_path,
        skip_eval=False,
        eval_samples=3,
        num_samples=1,
        max_new_tokens=2,
        lr=5e-3,
        max_steps=6,
    )
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    metrics = summary["last"]["metrics"]
    assert metrics["rewards/accuracies"] == 1.0 and metrics["rewards/margins"] > 0
    assert metrics["rewards/margins"] == pytest.approx(
        metrics["rewards/chosen"] - metrics["rewards/rejected"], abs=1e-5
    )
    assert (tmp_path / "run" / "report.html").is_file()


def test_the_held_out_loss_and_rewards_of_losses_per_token(pairs: Path) -> None:
    def measure(size: int, **more: Any) -> Any:
        recipe, session = open_both(pairs, skip_eval=False, eval_batch_size=size, num_samples=0, **more)
        return recipe.evaluate(session, observer=Observers()).metrics

    found = measure(2, preference_loss="orpo", eval_samples=5)
    assert found["loss"] == pytest.approx(
        measure(5, preference_loss="orpo", eval_samples=5)["loss"], rel=1e-5
    )
    mean = {side: found[f"logps/{side}"] / found[f"length/{side}"] for side in ("chosen", "rejected")}
    # The mean over pairs of the means over tokens, for answers of similar lengths.
    assert found["rewards/chosen"] == pytest.approx(0.1 * mean["chosen"], rel=0.05)
    assert (
        abs(found["rewards/margins"]) < 0.1
    )  # an untrained model does not tell them apart; sums would by their lengths


def test_the_order_of_a_list_of_losses_does_not_matter() -> None:
    from crosstune.recipes.preference.losses import check_options, make_loss

    for names in (("dpo:0.5", "orpo:0.5"), ("simpo:0.5", "dpo:0.5"), ("cpo:2", "sft:1")):
        found = [
            make_loss(make_config(recipe="preference", preference_loss=",".join(order)))
            for order in (names, names[::-1])
        ]
        assert found[0] == found[1]
    [problem] = check_options(make_config(recipe="preference", preference_loss="dpo:1,sft:0.1", sft_weight=5))
    assert "--sft_weight" in problem.message
