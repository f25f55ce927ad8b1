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

from crosstune.core.sampling import Sampling
from crosstune.torch_engine.generate import RepetitionPenalty

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


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_mlx_draws_from_the_distribution_of_transformers(sampling: Sampling) -> None:
    mx = pytest.importorskip("mlx.core", reason="needs the extra crosstune[mlx]")
    from crosstune.mlx_engine.generate import TokenChooser, filter_logits, penalize

    for seed in range(5):
        logits = logits_of(seed)
        prompts = [[1, 2, 3, 3], [4, 5, 6, 7], [96, 0, 0, 1]]
        expected = reference(sampling, torch.tensor(prompts), logits)
        chooser = TokenChooser(prompts, sampling)
        chooser.choose(mx.array(logits))
        scores = mx.array(logits)
        if sampling.repetition_penalty != 1:
            seen = np.zeros((3, VOCABULARY), dtype=bool)
            for row, prompt in enumerate(prompts):
                seen[row, prompt] = True
            scores = penalize(scores, mx.array(seen), sampling.repetition_penalty)
        found = np.array(mx.softmax(filter_logits(scores / sampling.temperature, sampling), axis=-1))
        np.testing.assert_array_equal(found == 0, expected == 0)
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_mlx_draws_with_the_frequencies_of_the_distribution_and_penalizes_what_it_said() -> None:
    mx = pytest.importorskip("mlx.core", reason="needs the extra crosstune[mlx]")
    from crosstune.mlx_engine.generate import TokenChooser

    sampling = Sampling(temperature=0.8, top_k=4, top_p=0.95)
    logits = np.repeat(logits_of(0)[:1], 4000, axis=0)
    expected = reference(sampling, torch.zeros((1, 1), dtype=torch.long), logits[:1])[0]
    drawn = np.array(TokenChooser([[0]] * 4000, sampling).choose(mx.array(logits)))
    np.testing.assert_allclose(np.bincount(drawn, minlength=VOCABULARY) / 4000, expected, atol=0.03)

    chooser = TokenChooser([[0]], Sampling(repetition_penalty=50.0))
    order = [int(chooser.choose(mx.array(logits[:1]))[0]) for _ in range(5)]
    assert len(set(order)) == 5, "greedy, but never the same token twice"


def test_the_torch_penalty_is_that_of_transformers_and_leaves_padding_alone() -> None:
    logits = torch.from_numpy(logits_of(1))
    ids = torch.tensor([[1, 2, 3, 3], [9, 9, 6, 7], [9, 0, 0, 1]])
    theirs = RepetitionPenaltyLogitsProcessor(1.7)
    whole = RepetitionPenalty(1.7, torch.ones_like(ids[:, :3]))
    torch.testing.assert_close(whole(ids, logits), theirs(ids, logits.clone()), rtol=0, atol=0)
    mask = torch.tensor([[1, 1, 1], [0, 0, 1], [0, 1, 1]])
    padded = RepetitionPenalty(1.7, mask)(ids, logits)
    alone = theirs(ids[1:2, 2:], logits[1:2].clone())
    torch.testing.assert_close(padded[1:2], alone, rtol=0, atol=0)


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
