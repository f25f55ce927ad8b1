"""The random draws of a latent-diffusion step, and the weights of its parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crosstune.cli.adopt import ENTRIES
from crosstune.config.load import load_config, make_config
from crosstune.config.schema import options_by_name
from crosstune.core.errors import UserError
from crosstune.machines.probe import load_machine
from crosstune.planner.gather import make_plan
from crosstune.recipes.latent_diffusion import check_options
from crosstune.recipes.latent_diffusion.batch import JOINT, L2T, T2L, divide_batch, draw, make_batch
from crosstune.recipes.latent_diffusion.correction import Best, propose
from crosstune.recipes.latent_diffusion.evaluation import retrieval, token_accuracy
from crosstune.recipes.latent_diffusion.pair_folder import Pairs
from crosstune.recipes.latent_diffusion.settings import make_modes, make_settings
from crosstune.recipes.latent_diffusion.vocabulary import PAD

ROWS, WIDTH, DIM = 4000, 20, 8


def drawn(**changes: Any) -> Any:
    lengths = np.random.default_rng(0).integers(1, WIDTH + 1, ROWS).astype(np.int32)
    given: dict[str, Any] = {
        "max_tokens": WIDTH,
        "dim": DIM,
        "shares": {"l2t": 0.6, "t2l": 0.3, "unconditional": 0.1},
        "dropped": 0.0,
        "key": (1, 2),
    }
    return lengths, draw(lengths, **given | changes)


def made_pairs(lengths: Any) -> Pairs:
    latents = np.random.default_rng(3).normal(size=(ROWS, DIM))
    latents /= np.linalg.norm(latents, axis=1, keepdims=True)
    return Pairs(
        tokens=np.ones((ROWS, WIDTH), np.uint16),
        lengths=lengths,
        latents=latents.astype(np.float32),
        text_file=Path(),
    )


def test_the_mask_rate_equals_the_time_within_three_sigma() -> None:
    lengths, found = drawn()
    real = np.arange(WIDTH) < lengths[:, None]
    assert not found.masked[~real].any(), "padding is never masked"
    for low in np.arange(0.0, 1.0, 0.1):
        rows = (found.text_time >= low) & (found.text_time < low + 0.1) & (found.mode != T2L)
        count = int(real[rows].sum())
        expected = float((found.text_time[rows, None] * real[rows]).sum() / count)
        sigma = np.sqrt(expected * (1 - expected) / count)
        assert abs(found.masked[rows].sum() / count - expected) < 3 * sigma, low


def test_times_follow_the_modes() -> None:
    _, found = drawn()
    shares = [(found.mode == mode).mean() for mode in (L2T, T2L, JOINT)]
    np.testing.assert_allclose(shares, [0.6, 0.3, 0.1], atol=0.03)
    assert (found.latent_time[found.mode == L2T] == 0).all() and (
        found.text_time[found.mode == T2L] == 0
    ).all()
    counts, _ = np.histogram(drawn(shares={"unconditional": 1.0})[1].text_time, bins=20, range=(0, 1))
    assert counts.min() > 0.9 * ROWS / 20 and counts.max() < 1.1 * ROWS / 20, "times are spread evenly"
    both = found.mode == JOINT
    assert (found.text_time[both] > 0).all() and (found.latent_time[both] > 0).all()


def test_dropped_conditions_say_nothing() -> None:
    lengths, found = drawn(dropped=0.25)
    without = found.without_latent
    assert abs(without[found.mode == L2T].mean() - 0.25) < 0.03 and not without[found.mode != L2T].any()
    assert (found.latent_time[without] == 1).all()
    silent = (found.mode == T2L) & (found.text_time == 1)
    assert abs(silent.sum() / (found.mode == T2L).sum() - 0.25) < 0.03
    np.testing.assert_array_equal(found.masked[silent].sum(1), lengths[silent])


def test_latent_noise_is_added_to_the_vectors_of_l2t() -> None:
    lengths, found = drawn(shares={"l2t": 0.5, "t2l": 0.5}, latent_noise=0.3)
    _, plain = drawn(shares={"l2t": 0.5, "t2l": 0.5})
    pairs = made_pairs(lengths)
    one, other = (make_batch(pairs, np.arange(ROWS), each) for each in (found, plain))
    is_l2t = found.mode == L2T
    added = one.noisy[is_l2t] - one.latents[is_l2t]
    assert abs(added.std() - 0.3) < 0.01 and abs((added * one.latents[is_l2t]).mean()) < 0.01
    np.testing.assert_array_equal(one.noisy[~is_l2t], other.noisy[~is_l2t])
    np.testing.assert_array_equal(one.masked, other.masked)


def test_a_step_is_a_function_of_its_number() -> None:
    _, one = drawn()
    _, same = drawn()
    _, other = drawn(key=(1, 3))
    np.testing.assert_array_equal(one.masked, same.masked)
    np.testing.assert_array_equal(one.noise, same.noise)
    assert (one.masked != other.masked).any() and (one.noise != other.noise).any()


def test_factors_make_means_over_the_whole_step() -> None:
    lengths, found = drawn()
    pairs = made_pairs(lengths)
    batch = make_batch(pairs, np.arange(ROWS), found, text_weight=2.0, latent_weight=0.5)
    assert batch.weight == ROWS and batch.num_tokens == lengths.sum()
    counted = (batch.masked * batch.text_factor[:, None]).sum()
    assert counted / ROWS == pytest.approx(2.0, rel=1e-5)
    assert batch.latent_factor.sum() / ROWS == pytest.approx(0.5, rel=1e-5)
    assert (batch.text_factor[found.mode == T2L] == 0).all() and (
        batch.latent_factor[found.mode == L2T] == 0
    ).all()
    parts = list(divide_batch(batch, size=1500))
    assert [part.weight for part in parts] == [1500, 1500, 1000]
    np.testing.assert_array_equal(np.concatenate([part.noisy for part in parts]), batch.noisy)
    np.testing.assert_allclose(batch.latents.std(), 1.0, atol=0.02)
    clean = found.mode == L2T
    np.testing.assert_allclose(batch.noisy[clean], batch.latents[clean], atol=1e-6)


def test_modes_of_a_schedule() -> None:
    config = make_config(loss_type="sequential", sequential_schedule="l2t:3,t2l:2,unconditional:1")
    modes = make_modes(config)
    order = [next(iter(modes.at(step))) for step in range(8)]
    assert order == ["l2t"] * 3 + ["t2l"] * 2 + ["unconditional"] * 3
    assert modes.all() == {"l2t", "t2l", "unconditional"}
    assert make_modes(make_config(loss_type="random", mode_weights="l2t:1,t2l:0")).all() == {"l2t"}


@pytest.mark.parametrize(
    "options",
    [{"mode_weights": "l2t:1,other:1"}, {"mode_weights": "l2t:-1,t2l:3"}, {"sequential_schedule": "l2t:0"}],
)
def test_modes_that_do_not_exist(options: dict[str, str]) -> None:
    with pytest.raises(UserError):
        make_config(**options)


def test_heads_that_do_not_divide_the_width() -> None:
    shape = {"vocabulary": 9, "max_tokens": 4, "latent_dim": 2}
    assert make_settings(make_config(hidden_size=1024), **shape).n_heads == 16
    assert make_settings(make_config(hidden_size=1024, n_heads=24), **shape).n_heads == 16
    with pytest.raises(UserError, match="24 heads"):
        make_settings(make_config(hidden_size=1024, n_heads=24, strict=True), **shape)


def test_scores_leave_padding_out() -> None:
    tokens = np.array([[5, 6, 0, 0], [7, 8, 9, 0]])
    guess = np.array([[5, 4, 0, 0], [7, 8, 9, 0]])
    assert token_accuracy(guess, tokens, np.array([2, 3])) == pytest.approx(4 / 5)
    assert retrieval(np.eye(3), np.eye(3)) == 1.0 and retrieval(np.eye(3), np.eye(3)[[1, 2, 0]]) == 0.0


def test_options_without_a_meaning_are_refused_all_at_once() -> None:
    config = make_config(
        recipe="latent_diffusion",
        train_type="lora",
        packing=True,
        columns="a=b",
        tokenizer="x",
        backend="mlx",
    )
    said = "\n".join(str(problem) for problem in check_options(config))
    for part in ("--backend mlx", "--train_type lora", "--columns and --packing have", "--tokenizer has"):
        assert part in said
    assert not list(check_options(make_config(recipe="latent_diffusion", train_type="full", hidden_size=64)))


@pytest.mark.parametrize(("recipe", "backend"), [("sft", "mlx"), ("latent_diffusion", "mps")])
def test_auto_takes_a_backend_whose_engine_the_recipe_has(recipe: str, backend: str) -> None:
    plan = make_plan(make_config(recipe=recipe), machine=load_machine("apple-m1-16gb"))
    assert plan.backend.name == backend


ORIGINAL = """
data: {token_dir: data/tokens/train, latent_dir: data/latents/train, num_workers: 16, max_samples: 500}
model: {type: multimodal_mmdit, diffusion_process: mdlm, hidden_size: 1024, n_blocks: 24, n_heads: 24, latent_dim: 32,
        max_seq_len: 2048, dropout: 0.1, num_residual_streams: 2, qk_rmsnorm: true, use_gradient_checkpointing: true}
training: {seed: 7, train_batch_size: 4, num_epochs: 10, num_train_steps: 1000, dtype: bf16, resume: null,
           sequential_schedule: [{type: l2t, steps: 5}, {type: t2l, steps: 6}]}
loss: {loss_type: l2t, latent_loss_weight: 0.1, reduction: tokenmean}
logging: {run_name: first, save_freq: 50, wandb_project: x}
optimizer: {lr: 5.0e-5, grad_clip_norm: 0.5, beta2: 0.95, use_fused: true}
"""


def test_the_originals_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mmdit_stable.yaml"
    path.write_text(ORIGINAL)
    config = load_config([], file=path, environment={})
    expected = {
        "recipe": "latent_diffusion",
        "train_type": "full",
        "dataset": "data",
        "dataset_samples": 500,
        "hidden_size": 1024,
        "n_blocks": 24,
        "batch_size": 4,
        "max_steps": 1000,
        "precision": "bf16",
        "seed": 7,
        "grad_norm": 0.5,
        "optimizer": "fused_adamw",
        "name": "first",
        "save_steps": 50,
        "use_gradient_checkpointing": True,
        "sequential_schedule": "l2t:5,t2l:6",
    }
    assert expected.items() <= config.options_asked().items()
    assert "num_epochs" not in config.sources  # the number of steps ends the run


def test_the_adopted_file_keeps_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "mmdit_stable.yaml"
    [text] = (entry.text() for entry in ENTRIES if entry.path.endswith("configs/mmdit_stable.yaml"))
    path.write_text(text)
    asked = load_config([], file=path, environment={}).options_asked()
    changed = {name for name, value in asked.items() if value != options_by_name()[name].default}
    script = {
        "max_steps",
        "save_steps",
        "log_every_n_steps",
        "eval_steps",
        "batch_size",
    }  # the script sets them
    assert changed == {"recipe", "train_type", "optimizer"} | script


def test_what_the_originals_file_means_otherwise_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mmdit_stable.yaml"
    changed = (
        ORIGINAL.replace("mdlm", "gidd")
        .replace("tokenmean", "mean")
        .replace("latent_dim: 32", "latnt_dim: 32")
    )
    path.write_text(changed)
    with pytest.raises(UserError) as error:
        load_config([], file=path, environment={})
    for part in ("model.diffusion_process", "loss.reduction", "model.latnt_dim"):
        assert part in str(error.value)


def test_the_entry_passes_the_variables_on() -> None:
    [script] = (entry.text() for entry in ENTRIES if entry.path.endswith(".sh"))
    for variable in ("NNODES", "NPROC_PER_NODE", "NODE_RANK", "MASTER_ADDR", "L2T_TRAIN_BS"):
        assert f"${{{variable}:-" in script
    assert '"${PYTHON:-python}" -m crosstune train' in script


def test_a_proposal_masks_the_improbable_tokens_of_a_shifted_text_too() -> None:
    """At this share, a token with score 0 is always masked, and one with score 1 in a third of the copies."""
    count, width = 400, 12
    sure = np.arange(width) % 2 == 0
    best = Best(
        tokens=np.tile(np.where(sure, 100, 50), (count, 1)),
        lengths=np.full(count, width - 2),
        scores=np.tile(np.where(sure, 1.0, 0.0), (count, 1)).astype(np.float32),
        cosine=np.zeros(count, np.float32),
    )
    best.tokens[:, width - 2 :] = PAD
    tokens, lengths, _ = propose(best, np.random.default_rng(0), 1, share=1 / 1.5)
    assert set(lengths.tolist()) == {width - 3, width - 2, width - 1}
    for size in (width - 3, width - 1):
        changed = tokens[lengths == size]
        assert (changed != 50).all(), "an improbable token was kept: its score stayed behind"
        kept = (changed == 100).sum(1)
        assert kept.mean() > 0.5 * sure[: width - 2].sum(), "probable tokens were masked in their place"
