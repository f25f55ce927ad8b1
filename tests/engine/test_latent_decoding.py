"""Decoding, encoding and sampling with the latent-diffusion model in torch, and the sentence encoder."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from latents import grammar_pairs, opened

from crosstune.recipes.latent_diffusion.batch import T_MIN
from crosstune.recipes.latent_diffusion.corpora import GrammarEncoder
from crosstune.recipes.latent_diffusion.correction import correct_texts
from crosstune.recipes.latent_diffusion.pair_folder import PairFolder
from crosstune.recipes.latent_diffusion.recipe import LatentDiffusionRecipe
from crosstune.recipes.latent_diffusion.settings import DecodeOptions
from crosstune.recipes.latent_diffusion.torch_parts_sampling import Sampler, to_clean
from crosstune.recipes.latent_diffusion.vocabulary import MASK, PAD

STEPS = 100
Learned = tuple[LatentDiffusionRecipe, Sampler]


@pytest.fixture(scope="module")
def overfit(tmp_path_factory: pytest.TempPathFactory) -> Learned:
    """A model that has learned 16 pairs by heart: texts from vectors, and both from noise."""
    pairs = grammar_pairs(tmp_path_factory.mktemp("pairs") / "grammar")
    return learned(pairs, STEPS, loss_type="random", mode_weights="l2t:0.7,unconditional:0.3")


def learned(pairs: PairFolder, steps: int, **options: Any) -> Learned:
    """Train on 16 pairs, all in every step."""
    recipe, session = opened(
        pairs,
        latent_loss_weight=1.0,
        dataset_samples=16,
        batch_size=16,
        hidden_size=64,
        n_blocks=1,
        max_steps=steps,
        **options,
    )
    for step in range(steps):
        session.backward([session.prepare(batch) for batch in recipe.micro_batches(step)])
        session.update(lr=5e-3 * min(1.0, (step + 1) / 15) * min(1.0, 2 * (steps - step) / steps))
    return recipe, session.task.sampler()


@pytest.mark.parametrize("kind", ["x0", "v", "epsilon"])
def test_every_parameterization_gives_the_clean_vector_back(kind: str) -> None:
    clean, noise, time = torch.randn(9, 5), torch.randn(9, 5), torch.linspace(0.05, 0.95, 9)
    alpha, sigma = (torch.pi / 2 * time).cos()[:, None], (torch.pi / 2 * time).sin()[:, None]
    predicted = {"x0": clean, "v": alpha * noise - sigma * clean, "epsilon": noise}[kind]
    found = to_clean(predicted, alpha * clean + sigma * noise, time, kind)
    torch.testing.assert_close(found, clean, rtol=1e-3, atol=1e-4)


def test_16_pairs_are_learned_to_the_last_token(overfit: Learned) -> None:
    recipe, sampler = overfit
    train, vocabulary = recipe.train, recipe.pairs.vocabulary
    found = sampler.decode(train.latents, options=DecodeOptions(steps=8))
    assert vocabulary.decode_batch(found.tokens) == train.texts
    shuffled = sampler.decode(np.roll(train.latents, 1, axis=0), options=DecodeOptions(steps=8))
    assert vocabulary.decode_batch(shuffled.tokens) == np.roll(train.texts, 1).tolist()


def test_the_vectors_of_16_texts_are_learned(overfit: Learned) -> None:
    recipe, sampler = learned(overfit[0].pairs, 64, loss_type="t2l")
    train = recipe.train
    vectors = sampler.encode(train.tokens, train.lengths, steps=8)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)
    near = vectors @ np.asarray(train.latents).T
    assert (near.argmax(1) == np.arange(16)).all() and np.diag(near).mean() > 0.9


def test_texts_and_vectors_from_noise_belong_together(overfit: Learned) -> None:
    (recipe, sampler), encoder, masked = overfit, GrammarEncoder(), []
    found = sampler.generate(
        24,
        options=DecodeOptions(steps=12, temperature=1.0),
        on_step=lambda step, steps, tokens: masked.append(int((tokens == MASK).sum())),
    )
    assert len(masked) == 12 and masked == sorted(masked, reverse=True) and masked[-1] == 0
    np.testing.assert_array_equal((found.tokens != PAD).sum(1), found.lengths)
    np.testing.assert_allclose(np.linalg.norm(found.vectors, axis=1), 1.0, atol=1e-5)
    texts = recipe.pairs.vocabulary.decode_batch(found.tokens)
    near = encoder.encode(texts) @ found.vectors.T
    assert len(set(texts)) > 6
    assert np.diag(near).mean() > near.mean() + 0.25
    again = sampler.generate(24, options=DecodeOptions(steps=12, temperature=1.0))
    other = sampler.generate(24, options=DecodeOptions(steps=12, temperature=1.0, seed=1))
    np.testing.assert_array_equal(again.tokens, found.tokens)
    assert (other.vectors != found.vectors).any()


def test_the_bound_is_that_of_all_masks_and_times(overfit: Learned) -> None:
    """Of four tokens, every mask can be tried, and the times be integrated."""
    recipe, sampler = overfit
    train = recipe.train
    model = sampler.model
    tokens = torch.tensor(train.tokens[:1, :4].tolist())
    # The vector of another text: the model is unsure, so that each mask costs something else.
    vector = torch.tensor(train.latents[1:2].tolist()) * train.latents.shape[1] ** 0.5
    nodes, weights = np.polynomial.legendre.leggauss(24)
    masks = torch.tensor(list(itertools.product((False, True), repeat=4))[1:])
    exact = 0.0
    with torch.no_grad():
        for node, weight in zip(0.5 + (0.5 - T_MIN) * nodes, weights / 2, strict=True):
            rows, time = len(masks), torch.full((len(masks),), float(node))
            logits = model(
                torch.where(masks, MASK, tokens),
                torch.full((rows,), 4),
                vector.expand(rows, -1),
                time,
                torch.zeros(rows),
            ).logits
            each = -torch.log_softmax(logits, -1).gather(2, tokens.long().expand(rows, 4)[..., None])[..., 0]
            count = masks.sum(1)
            chance = node**count * (1 - node) ** (4 - count)
            exact += weight * float((chance * (each * masks).sum(1)).sum() / node)
        drawn = [
            sampler.sum_of_nats(
                tokens.expand(1024, -1), torch.full((1024,), 4), vector.expand(1024, -1), key=(7, number)
            )
            / 1024
            for number in range(12)
        ]
    assert exact > 1.0
    assert np.mean(drawn) == pytest.approx(exact, abs=5 * np.std(drawn, ddof=1) / 12**0.5)
    assert np.std(drawn, ddof=1) < 0.2 * exact


def test_decoding_unmasks_step_by_step(overfit: Learned) -> None:
    recipe, sampler = overfit
    masked: list[int] = []
    sampler.decode(
        recipe.train.latents[:4],
        options=DecodeOptions(steps=5, guidance=1.5),
        on_step=lambda step, steps, tokens: masked.append(int((tokens == MASK).sum())),
    )
    assert len(masked) == 5 and masked == sorted(masked, reverse=True) and masked[-1] == 0
    assert all(one > other for one, other in itertools.pairwise(masked))
    drawn = [
        sampler.decode(
            recipe.train.latents[:4], options=DecodeOptions(temperature=3.0, seed=seed)
        ).tokens.tolist()
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_filling_keeps_what_is_not_masked(overfit: Learned) -> None:
    recipe, sampler = overfit
    train = recipe.train
    tokens = np.asarray(train.tokens[:8], np.int64).copy()
    tokens[:, 1] = MASK
    found = sampler.fill(tokens, train.lengths[:8], train.latents[:8], options=DecodeOptions(steps=2))
    kept = tokens != MASK
    np.testing.assert_array_equal(found.tokens[kept], tokens[kept])
    assert (found.tokens != MASK).all() and (found.scores[kept] == 1).all()


def test_correction_comes_nearer_to_the_vector(overfit: Learned) -> None:
    """Of texts that the model has not seen."""
    (recipe, sampler), encoder = overfit, GrammarEncoder()
    held_out, vocabulary = recipe.held_out, recipe.pairs.vocabulary
    single = sampler.decode(held_out.latents, options=DecodeOptions())
    first = (encoder.encode(vocabulary.decode_batch(single.tokens)) * held_out.latents).sum(-1).mean()
    rounds = correct_texts(
        sampler,
        encoder,
        vocabulary,
        np.asarray(held_out.latents),
        options=DecodeOptions(),
        rounds=9,
        candidates=6,
    )
    means = [float((found := each).cosine.mean()) for each in itertools.islice(rounds, 4)]
    assert means == sorted(means) and means[-1] > first + 0.05
    texts = vocabulary.decode_batch(found.tokens)
    cosines = (encoder.encode(texts) * held_out.latents).sum(-1)
    assert cosines.mean() == pytest.approx(means[-1], abs=1e-4)
