"""Losses and gradients of distillation equal TRL's generalized_jsd_loss, on the same tokens and models, on both engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
import transformers as hf
from support import assert_same_gradients, tiny_of

from crosstune.config.load import make_config
from crosstune.core.events import Observers
from crosstune.models.tiny import tiny_model
from crosstune.planner.gather import make_plan
from crosstune.recipes.distill.losses import Objective, measure, read_teacher
from crosstune.runs.open_parts import find_model, open_session
from crosstune.runs.open_recipe import open_recipe
from crosstune.torch_engine import array_functions as torch_functions

VOCAB = 512
OBJECTIVES: dict[str, dict[str, Any]] = {
    "forward_kl": {"distill_loss": "forward_kl"},
    "reverse_kl": {"distill_loss": "reverse_kl", "distill_temperature": 0.7},
    "jsd": {"distill_loss": "jsd", "distill_beta": 0.3, "distill_temperature": 2.0},
}


def trl_loss(student: torch.Tensor, teacher: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return TRL's loss, summed over the tokens."""
    gkd = pytest.importorskip("trl.experimental.gkd.gkd_trainer")
    beta = {"forward_kl": 0, "reverse_kl": 1}.get(options["distill_loss"], options.get("distill_beta"))
    found: torch.Tensor = gkd.GKDTrainer.generalized_jsd_loss(
        student, teacher, beta=beta, temperature=options.get("distill_temperature", 1.0), reduction="sum"
    )
    return found


def paper_loss(student: np.ndarray, teacher: np.ndarray, **options: Any) -> float:
    """Return equation 1 and its limits of arXiv:2306.13649 in fp64, from probabilities instead of their logarithms."""
    t = options.get("distill_temperature", 1.0)
    q, p = (np.exp(x / t) / np.exp(x / t).sum(axis=-1, keepdims=True) for x in (student, teacher))

    def kl(a: np.ndarray, b: np.ndarray) -> float:
        return float((a * np.log(a / b)).sum())

    if options["distill_loss"] != "jsd":
        return kl(p, q) if options["distill_loss"] == "forward_kl" else kl(q, p)
    beta = options["distill_beta"]
    mixture = beta * p + (1 - beta) * q
    return beta * kl(p, mixture) + (1 - beta) * kl(q, mixture)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("top_k", [0, 8])
def test_the_loss_of_given_logits(name: str, top_k: int) -> None:
    draw = np.random.default_rng(0)
    student, teacher = (draw.normal(0, 2, (5, 40)) for _ in range(2))
    targets = torch.from_numpy(draw.integers(0, 40, 5))
    config = make_config(recipe="distill", teacher_top_k=top_k, **OBJECTIVES[name])
    objective = Objective.from_config(config, width=40)
    rows = read_teacher(torch.from_numpy(teacher), targets, objective, torch_functions)
    losses, values = measure(torch.from_numpy(student), targets, rows, objective, torch_functions, weight=0.5)
    plain = F.cross_entropy(torch.from_numpy(student), targets, reduction="sum")
    if top_k:  # the same formula over the most likely tokens and the sum of all others
        t = objective.temperature
        kept = np.argsort(-teacher, axis=-1)[:, :top_k]

        def lump(logits: np.ndarray) -> np.ndarray:
            probs = np.exp(logits / t) / np.exp(logits / t).sum(axis=-1, keepdims=True)
            chosen = np.take_along_axis(probs, kept, axis=-1)
            return t * np.log(np.concatenate([chosen, 1 - chosen.sum(axis=-1, keepdims=True)], axis=-1))

        expected = paper_loss(lump(student), lump(teacher), **OBJECTIVES[name])
    else:
        expected = paper_loss(student, teacher, **OBJECTIVES[name])
    assert float(losses.sum() - 0.5 * plain) == pytest.approx(expected, rel=1e-10)
    assert float(values[:, 1].sum()) == pytest.approx(float(plain), rel=1e-10)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models of different families and sizes with the same tokenizer, larger logits than at random, and data."""
    home = tmp_path_factory.mktemp("distill")
    tiny_model(home / "student")
    tiny_model(home / "teacher", hidden=96, num_layers=3)
    tiny_of("qwen2", home / "other", VOCAB)
    for name in ("student", "teacher", "other"):
        for file in (home / "student").glob("*token*"):
            (home / name / file.name).write_bytes(file.read_bytes())
        model = hf.AutoModelForCausalLM.from_pretrained(home / name)
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(8.0)
        model.save_pretrained(home / name)
    rows = [
        {"prompt": f"Say {n}, please.", "completion": f"{n} it is" + " and so on" * (n % 4)}
        for n in range(16)
    ]
    (home / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return home


def gradients(home: Path, backend: str, **options: Any) -> tuple[float, dict[str, np.ndarray], Any]:
    """Return the loss and the gradients of one step of 8 rows, and the recipe."""
    config = make_config(
        recipe="distill", model_name=str(home / "student"), dataset=str(home / "data.jsonl"), backend=backend,
        **{"teacher": str(home / "teacher"), "precision": "fp32", "batch_size": 4, "skip_eval": True}
        | {"gradient_accumulation_steps": 2, "apply_gradient_clipping": False, **options},
    )  # fmt: skip
    plan = make_plan(config)
    model = find_model(plan.config, Observers())
    recipe = open_recipe(plan.config, model, Observers())
    recipe.configure(plan.config)
    session: Any = open_session(plan, model, task=recipe.task(plan.engine))
    for name, array in (state := session.export_state().weights).items():
        if name.endswith("lora_B.weight"):  # zero at the start
            array[...] = np.random.default_rng(len(name)).normal(0, 0.05, array.shape)
    session.import_weights(state)
    window = [session.prepare(batch) for batch in recipe.micro_batches(0)]
    loss = session.backward(window).loss
    if backend == "mlx":
        return loss, {name: np.array(array) for name, array in session._pending.items()}, recipe
    found = {name: master.grad.numpy() for name, master in session.masters.masters.items()}
    return loss, found, recipe


def trl_step(home: Path, recipe: Any, teacher: str, **options: Any) -> tuple[float, dict[str, np.ndarray]]:
    """Return the loss and the gradients of a full model by transformers and TRL."""
    student, other = (hf.AutoModelForCausalLM.from_pretrained(home / name) for name in ("student", teacher))
    total, count = torch.zeros(()), 0
    for batch in recipe.micro_batches(0):
        ids, kept = (
            torch.from_numpy(batch.tokens.input_ids).long(),
            torch.from_numpy(batch.tokens.targets != -100),
        )
        with torch.no_grad():
            wanted = other(ids).logits[kept]
        total = total + trl_loss(student(ids).logits[kept], wanted, **options)
        count += int(kept.sum())
    (total / count).backward()
    found = {name: p.grad.numpy() for name, p in student.named_parameters() if p.grad is not None}
    return float(total) / count, found


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("teacher", ["teacher", "other"])
def test_a_step_of_full_training_equals_that_of_trl(home: Path, name: str, teacher: str) -> None:
    options = OBJECTIVES[name]
    for backend in ("cpu", "mlx"):
        asked = {"train_type": "full", "teacher": str(home / teacher), **options}
        loss, found, recipe = gradients(home, backend, **asked)
        expected_loss, expected = trl_step(home, recipe, teacher, **options)
        assert expected_loss > 0.05 and loss == pytest.approx(expected_loss, rel=1e-5)
        assert_same_gradients({name: found[name] for name in expected}, expected)


@pytest.mark.parametrize("options", [{}, {"ce_weight": 0.5, "teacher_top_k": 8, "distill_temperature": 1.5}])
def test_the_layers_the_engines_and_a_small_chunk_give_the_same_step(
    home: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    loss, found, _ = gradients(home, "cpu", kernels="fast", **options)
    for backend, more in (("cpu", {"kernels": "general"}), ("mlx", {})):
        other, same, _ = gradients(home, backend, **more, **options)
        assert other == pytest.approx(loss, rel=1e-5)
        assert_same_gradients(same, found, bound=2e-5)
    monkeypatch.setattr("crosstune.torch_engine.tasks.token_losses.LOGITS_AT_A_TIME", 3 * VOCAB)
    monkeypatch.setattr("crosstune.mlx_engine.tasks.causal_lm.LOGITS_AT_A_TIME", 3 * VOCAB)
    monkeypatch.setattr("crosstune.mlx_engine.tasks.causal_lm.PLACES_AT_LEAST", 3)
    monkeypatch.setattr("crosstune.torch_engine.kernels.head_loss.rows_at_a_time", lambda *_, **__: 3)
    for backend, more in (("cpu", {"kernels": "general"}), ("cpu", {"kernels": "fast"}), ("mlx", {})):
        chunked, same, _ = gradients(home, backend, **more, **options)
        assert chunked == pytest.approx(loss, rel=1e-5)
        assert_same_gradients(same, found, bound=2e-5)
