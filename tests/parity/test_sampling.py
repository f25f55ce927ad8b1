"""Sampling of both engines against transformers' own processors, on random logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from crosstune.core.answers import draw_numbers
from crosstune.core.sampling import Sampling
from crosstune.torch_engine.generate.sampler import Sampler, filter_logits, penalize

VOCABULARY = 97
SETTINGS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_k=5),
    Sampling(temperature=0.7, top_k=1000),
    Sampling(temperature=1.3, top_p=0.6),
    Sampling(temperature=1.3, top_p=1e-6),
    Sampling(temperature=0.9, min_p=0.2),
    Sampling(temperature=0.9, min_p=1.0),
    Sampling(temperature=0.8, top_k=20, top_p=0.9, min_p=0.05, repetition_penalty=1.3),
    Sampling(temperature=2.0, repetition_penalty=0.5),
]


def logits_of(seed: int) -> np.ndarray[Any, Any]:
    return (4 * np.random.default_rng(seed).standard_normal((3, VOCABULARY))).astype(np.float32)


def reference(sampling: Sampling, ids: torch.Tensor, logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the probabilities that transformers draws from."""
    processors = LogitsProcessorList()
    if sampling.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    processors.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        processors.append(MinPLogitsWarper(sampling.min_p))
    scores = processors(ids, torch.from_numpy(logits))
    return np.asarray(torch.softmax(scores, dim=-1))


def mark(prompts: list[list[int]]) -> np.ndarray[Any, Any]:
    seen = np.zeros((len(prompts), VOCABULARY), dtype=bool)
    for row, prompt in enumerate(prompts):
        seen[row, prompt] = True
    return seen


@pytest.mark.parametrize("engine", ["torch", "mlx"])
@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_tokens_are_drawn_from_the_distribution_of_transformers(engine: str, sampling: Sampling) -> None:
    prompts = [[1, 2, 3, 3], [4, 5, 6, 7], [96, 0, 0, 1]]
    seen, penalty, warmth = mark(prompts), sampling.repetition_penalty, sampling.temperature
    for seed in range(5):
        logits = logits_of(seed)
        expected = reference(sampling, torch.tensor(prompts), logits)
        if engine == "mlx":
            mx = pytest.importorskip("mlx.core", reason="needs the extra crosstune[mlx]")
            from crosstune.mlx_engine import generate as ours

            scores = ours.penalize(mx.array(logits), mx.array(seen), penalty) / warmth
            found = np.array(mx.softmax(ours.filter_logits(scores, sampling), axis=-1))
        else:
            whole = penalize(torch.from_numpy(logits), torch.from_numpy(seen), penalty) / warmth
            found = filter_logits(whole, sampling).softmax(-1).numpy()
        np.testing.assert_array_equal(found == 0, expected == 0)
        np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("engine", ["torch", "mlx"])
@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0.8), Sampling(temperature=0.8, top_k=4, top_p=0.95)]
)
def test_drawn_frequencies_pass_a_chi_square_test(engine: str, sampling: Sampling) -> None:
    """With a fixed seed, so that it always passes or always fails: the bound is exceeded by chance once in 10,000 seeds."""
    count, logits = 20_000, logits_of(0)[:1]
    expected = reference(sampling, torch.zeros((1, 1), dtype=torch.long), logits)[0]
    numbers = np.array([draw_numbers(sampling, [7, 8], number=n, count=1)[0] for n in range(count)])
    if engine == "mlx":
        mx = pytest.importorskip("mlx.core", reason="needs the extra crosstune[mlx]")
        from crosstune.mlx_engine.generate import choose_tokens

        drawn, log_probs = (
            np.array(found)
            for found in choose_tokens(
                mx.array(np.repeat(logits, count, 0)), mx.array(numbers.astype(np.float32)), sampling
            )
        )
    else:
        rows = torch.from_numpy(logits).expand(count, -1)
        drawn, log_probs = (
            found.numpy()
            for found in Sampler(sampling, torch.device("cpu")).choose(rows, torch.from_numpy(numbers), None)
        )
    frequent = expected * count >= 5  # the others are one class
    seen = np.bincount(drawn, minlength=VOCABULARY)
    observed = np.append(seen[frequent], seen[~frequent].sum())
    wanted = np.append(expected[frequent], expected[~frequent].sum()) * count
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    assert seen[expected == 0].sum() == 0
    degrees = len(wanted) - 1
    # The quantile of chi-square by Wilson and Hilferty.
    bound = degrees * (1 - 2 / (9 * degrees) + 3.719 * (2 / (9 * degrees)) ** 0.5) ** 3
    assert ((observed - wanted) ** 2 / wanted).sum() < bound
    whole = torch.from_numpy(logits[0] / sampling.temperature).log_softmax(-1).numpy()
    np.testing.assert_allclose(log_probs, whole[drawn], atol=1e-5)


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
def test_a_session_applies_every_setting(backend: str, tiny_model: Path) -> None:
    if backend == "mlx":
        pytest.importorskip("mlx_lm", reason="needs the extra crosstune[mlx]")
    from crosstune.config.load import make_config
    from crosstune.models.locate import ModelFolder
    from crosstune.planner.gather import make_plan
    from crosstune.runs.open_parts import open_session

    config = make_config(model_name=str(tiny_model), train_type="full", backend=backend, precision="fp32")
    model = ModelFolder(name="tiny", path=tiny_model, source="folder")
    session: Any = open_session(make_plan(config), model, trained=False)
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12]]

    def answer(**settings: Any) -> list[list[int]]:
        return session.generate(prompts, max_new_tokens=8, sampling=Sampling(**settings))

    greedy = answer()
    hot = {"temperature": 50.0, "seed": 3}
    assert answer(**hot) != greedy
    for only_the_likeliest in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert answer(**hot, **only_the_likeliest) == greedy
    different = answer(repetition_penalty=100.0)
    assert all(len(set(row)) == 8 for row in different), "no token twice"
    alone = [
        session.generate([p], max_new_tokens=8, sampling=Sampling(repetition_penalty=100.0)) for p in prompts
    ]
    assert [rows[0] for rows in alone] == different
