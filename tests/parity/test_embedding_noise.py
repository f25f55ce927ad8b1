"""NEFTune noise equals a reference, on both engines and for every division of a step."""

from __future__ import annotations

import importlib.util
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from injection.bench import Bench
from support import train_step
from transformers import AutoModelForCausalLM, Gemma2Config

from crosstune.config.load import make_config
from crosstune.core.errors import UserError
from crosstune.core.protocols import Session
from crosstune.data.batches.token_batch import (
    Example,
    TokenBatch,
    add_noise,
    pack_rows,
    split_rows,
    without_padding,
)
from crosstune.files.json_files import read_jsonl
from crosstune.models.locate import ModelFolder
from crosstune.models.tiny import tiny_model as make_tiny
from crosstune.planner.gather import make_plan
from crosstune.runs.open_parts import open_session as open_by_plan
from crosstune.runs.pipeline import train
from crosstune.torch_engine.tasks.model_input import noise as torch_noise

HAS_MLX = importlib.util.find_spec("mlx_lm") is not None
BACKENDS = ["cpu", pytest.param("mlx", marks=pytest.mark.skipif(not HAS_MLX, reason="needs the mlx extra"))]
ALPHA = 40.0
LENGTHS = (5, 9, 14, 11, 7, 6)


def examples() -> list[Example]:
    random = np.random.default_rng(0)
    return [
        Example(tokens=random.integers(3, 200, n).astype(np.int32), supervised=np.ones(n, bool), index=index)
        for index, n in enumerate(LENGTHS)
    ]


def noisy(step: int = 0, *, batch_size: int = 3, seed: int = 1, alpha: float = ALPHA) -> list[TokenBatch]:
    rows = list(split_rows(examples(), batch_size=batch_size, pad_id=0))
    return add_noise(rows, alpha=alpha, seed=seed, step=step)


def reference_noise(keys: np.ndarray, scales: np.ndarray, channels: int) -> np.ndarray:
    """MurmurHash3's finalizer in Python integers, one number at a time."""
    found = np.zeros((*keys.shape, channels))
    for place in np.ndindex(*keys.shape):
        for channel in range(channels):
            h = (int(keys[place]) + channel * 0x9E3779B9) % 2**32
            h = ((h ^ (h >> 16)) * 0x85EBCA6B) % 2**32
            h = ((h ^ (h >> 13)) * 0xC2B2AE35) % 2**32
            uniform = ((h ^ (h >> 16)) >> 8) / 2**23 - 1
            found[(*place, channel)] = uniform * float(scales[place]) / math.sqrt(channels)
    return found


def engine_noise(backend: str, batch: TokenBatch, channels: int) -> np.ndarray:
    assert batch.noise_keys is not None and batch.noise_scales is not None
    if backend == "cpu":
        keys = torch.from_numpy(batch.noise_keys.view("int32"))
        return torch_noise(keys, torch.from_numpy(batch.noise_scales), channels).numpy()
    import mlx.core as mx

    from crosstune.mlx_engine.tasks.causal_lm import noise

    return np.array(noise(mx.array(batch.noise_keys), mx.array(batch.noise_scales), channels))


def open_session(backend: str, folder: Path, **options: Any) -> Session:
    asked = {"backend": backend, "precision": "fp32", "model_name": str(folder), "train_type": "full"}
    model = ModelFolder(name=str(folder), path=folder, source="folder")
    return open_by_plan(make_plan(make_config(**(asked | options))), model)


def losses(session: Session, num_steps: int = 4, **options: Any) -> list[float]:
    return [train_step(session, noisy(step, **options), lr=1e-3).loss for step in range(num_steps)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_noise_is_that_of_the_reference(backend: str) -> None:
    for batch in noisy():
        assert batch.noise_keys is not None and batch.noise_scales is not None
        expected = reference_noise(batch.noise_keys, batch.noise_scales, 12)
        np.testing.assert_allclose(engine_noise(backend, batch, 12), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_is_uniform_within_the_bound_of_the_paper(backend: str) -> None:
    """alpha / sqrt(L d), with the length of the row itself, and nothing at padding."""
    [batch], width = noisy(batch_size=6), 4096
    found = engine_noise(backend, batch, width)
    for row, length in zip(found, LENGTHS, strict=True):
        assert not row[length:].any()
        unit = row[:length] / (ALPHA / math.sqrt(length * width))
        assert -1.0001 < unit.min() < -0.999 and 0.999 < unit.max() < 1.0001
        count = unit.size
        assert abs(unit.mean()) < 5 * math.sqrt(1 / 3 / count)
        assert abs((unit**2).mean() - 1 / 3) < 5 * math.sqrt(4 / 45 / count)
        between = np.corrcoef(unit)[~np.eye(length, dtype=bool)]  # no token has the noise of another
        assert np.abs(between).max() < 6 / math.sqrt(width)
        assert abs(np.corrcoef(unit[:, :-1].ravel(), unit[:, 1:].ravel())[0, 1]) < 5 / math.sqrt(count)


def test_it_depends_on_seed_step_and_row_alone() -> None:
    def by_row(batches: list[TokenBatch]) -> list[np.ndarray]:
        keys = [row for batch in batches for row in batch.noise_keys]  # type: ignore[union-attr]
        return [row[:n] for row, n in zip(keys, LENGTHS, strict=True)]

    whole = by_row(noisy())
    for size in (1, 2, 6):  # other micro-batches, so other paddings and ranks
        for row, expected in zip(by_row(noisy(batch_size=size)), whole, strict=True):
            np.testing.assert_array_equal(row, expected)
    for other in (noisy(1), noisy(seed=2)):
        assert not any((row == expected).any() for row, expected in zip(by_row(other), whole, strict=True))
    assert not (whole[2][:11] == whole[3]).any()


def test_packed_documents_have_their_own_lengths() -> None:
    [batch] = add_noise([pack_rows([examples()[:2]], pad_id=0)], alpha=ALPHA, seed=1, step=0)
    assert batch.noise_scales is not None
    expected = [ALPHA / math.sqrt(5)] * 5 + [ALPHA / math.sqrt(9)] * 9 + [0.0] * 2
    np.testing.assert_allclose(batch.noise_scales[0], expected, rtol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_training_is_that_of_a_transformers_loop_with_noise(backend: str, tiny_model: Path) -> None:
    ours = losses(open_session(backend, tiny_model, wd=0.1, apply_gradient_clipping=False))
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).train()
    matrices, vectors = (
        [p for p in model.parameters() if (p.ndim > 1) is matrix] for matrix in (True, False)
    )
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer, expected = torch.optim.AdamW(groups, lr=1e-3), []
    width = model.config.hidden_size
    for step in range(4):
        total, count = 0.0, sum(LENGTHS) - len(LENGTHS)
        for batch in noisy(step, batch_size=1):
            length = batch.num_tokens
            ids = torch.from_numpy(batch.input_ids[:, :length]).long()
            assert batch.noise_keys is not None and batch.noise_scales is not None
            added = reference_noise(batch.noise_keys[:, :length], batch.noise_scales[:, :length], width)
            embeds = model.get_input_embeddings()(ids) + torch.from_numpy(added).float()
            logits = model(inputs_embeds=embeds).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum") / count
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(total)
    assert ours == pytest.approx(expected, rel=1e-5)
    silent = losses(open_session(backend, tiny_model, wd=0.1, apply_gradient_clipping=False), alpha=0.0)
    assert abs(silent[0] / ours[0] - 1) > 1e-4, "the noise matters, so that the comparison can fail"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{}, {"use_gradient_checkpointing": True, "train_type": "lora"}])
def test_an_evaluation_has_no_noise(backend: str, options: dict[str, Any], tiny_model: Path) -> None:
    session = open_session(backend, tiny_model, **options)
    plain = [replace(batch, noise_keys=None, noise_scales=None) for batch in noisy()]
    assert session.evaluate(noisy()).loss == session.evaluate(plain).loss
    assert train_step(session, noisy(), lr=1e-3).loss != session.evaluate(plain).loss
    assert session.evaluate(noisy()).loss == session.evaluate(plain).loss


def test_the_fast_layers_add_the_same_noise(tiny_model: Path) -> None:
    """With and without padding, as on a GPU that attends by document."""
    assert without_padding(noisy()[0]).noise_keys is not None
    general = losses(open_session("cpu", tiny_model, train_type="lora", kernels="general"))
    for drops_padding in (False, True):
        fast: Any = open_session("cpu", tiny_model, train_type="lora", kernels="fast")
        fast.task.decoder.drops_padding = drops_padding
        assert losses(fast) == pytest.approx(general, rel=1e-5)


@pytest.mark.skipif(not HAS_MLX, reason="needs the mlx extra")
def test_both_engines_train_alike_where_the_model_scales_its_embeddings(tmp_path: Path) -> None:
    make_tiny(tmp_path, vocab=512)
    (tmp_path / "model.safetensors").unlink()
    shape = {
        "vocab_size": 512,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "head_dim": 16,
    }
    config = Gemma2Config(**shape, num_attention_heads=2, num_key_value_heads=1, pad_token_id=0)
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(tmp_path)
    ours, theirs = (losses(open_session(backend, tmp_path)) for backend in ("mlx", "cpu"))
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_a_run_is_the_same_after_a_resume_and_with_other_micro_batches(
    tmp_path: Path, tiny_model: Path
) -> None:
    bench = Bench(tmp_path / "bench")

    def run(folder: Path, **more: Any) -> list[float]:
        options = bench.options("lora", folder, max_steps=4, save_steps=2, keep_last_n=9, neftune_alpha=ALPHA)
        train(make_config(**options | more))
        return [row["loss"] for row in read_jsonl(folder / "metrics.jsonl")]

    straight = run(tmp_path / "straight")
    shutil.copytree(tmp_path / "straight", tmp_path / "resumed", symlinks=True)
    point = tmp_path / "resumed" / "checkpoints" / "step-00000002"
    assert run(tmp_path / "resumed", resume=str(point)) == straight
    calm = {"lora_dropout": 0.0, "model_name": str(tiny_model)}  # the other model has dropout of its own
    whole = run(tmp_path / "whole", **calm)
    assert run(tmp_path / "ones", batch_size=1, gradient_accumulation_steps=4, **calm) == pytest.approx(
        whole, rel=1e-5
    )
    assert run(tmp_path / "silent", neftune_alpha=0.0, **calm) != pytest.approx(whole, rel=1e-4)


@pytest.mark.parametrize("recipe", ["judge", "latent_diffusion"])
def test_a_recipe_without_noise_rejects_it(recipe: str) -> None:
    with pytest.raises(UserError, match=f"--neftune_alpha does not apply to the {recipe} recipe"):
        make_plan(make_config(recipe=recipe, neftune_alpha=5, backend="cpu"))
