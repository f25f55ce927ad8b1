"""Train on noisy (text, vector) pairs, and evaluate by decoding and encoding held-out pairs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from crosstune.config.schema import Config
from crosstune.core.events import Observer
from crosstune.core.protocols import Evaluation, Sample, Task
from crosstune.core.weights import averaged
from crosstune.data.batches.row_order import rows_per_evaluation
from crosstune.recipes.latent_diffusion.batch import PairBatch, divide_batch, draw, make_batch
from crosstune.recipes.latent_diffusion.evaluation import (
    cosine,
    exact_match,
    has_sacrebleu,
    one_shot_accuracy,
    retrieval,
    text_scores,
)
from crosstune.recipes.latent_diffusion.pair_folder import PairFolder, Pairs
from crosstune.recipes.latent_diffusion.settings import (
    DecodeOptions,
    load_settings,
    make_modes,
    make_settings,
)
from crosstune.recipes.sft import OrderedRecipe

_EVALUATION = 2**40
"""The step number for the noise of evaluations."""


class LatentDiffusionRecipe(OrderedRecipe):
    weight_name = "examples"

    def __init__(self, config: Config, pairs: PairFolder) -> None:
        self.config, self.pairs = config, pairs
        self.modes = make_modes(config)
        self.train = pairs.rows_of("train", config.dataset_samples)
        self.held_out = pairs.rows_of("validation", config.eval_samples)
        self.settings = make_settings(
            config, vocabulary=pairs.vocabulary.size, max_tokens=pairs.max_tokens, latent_dim=pairs.dim
        )

    def task(self, engine: str) -> Task:
        assert engine == "torch", "the spec lists the engines"
        from crosstune.recipes.latent_diffusion.torch_parts import LatentDiffusionTask

        return LatentDiffusionTask(self.settings, modes=self.modes.all(), latent_loss=self.config.latent_loss)

    def micro_batches(self, step: int) -> list[PairBatch]:
        batch = self._batch(
            self.train,
            np.array(self.rows(step), np.int64),
            step,
            shares=self.modes.at(step),
            dropped=self.config.cfg_dropout_prob,
            latent_noise=self.config.latent_noise,
        )
        return list(divide_batch(batch, size=self.config.batch_size))

    def _batch(
        self, pairs: Pairs, rows: Any, step: int, *, shares: Mapping[str, float], **noise: float
    ) -> PairBatch:
        drawn = draw(
            np.asarray(pairs.lengths[rows], np.int32),
            max_tokens=self.pairs.max_tokens,
            dim=self.pairs.dim,
            shares=shares,
            key=(self.config.seed, step),
            **noise,
        )
        config = self.config
        return make_batch(
            pairs, rows, drawn, text_weight=config.text_loss_weight, latent_weight=config.latent_loss_weight
        )

    def longest_row(self) -> int:
        return int(self.train.lengths.max())

    def longest_target(self) -> int:
        return self.longest_row()

    def longest_batch(self, size: int) -> PairBatch:
        longest = np.argsort(-np.asarray(self.train.lengths), kind="stable")
        return self._batch(self.train, np.sort(np.resize(longest, size)), 0, shares=self.modes.at(0))

    def activation_bytes(self, rows: int, *, width: int, recompute: bool) -> int:
        lengths = np.asarray(self.train.lengths)
        return self.settings.activation_bytes(
            rows,
            mean_tokens=float(lengths.mean()),
            longest=int(lengths.max()),
            width=width,
            recompute=recompute,
        )

    def identity(self) -> str:
        facts = f"{self.pairs.identity('train')} {len(self.train)} {self.pairs.vocabulary.digest}"
        return hashlib.sha256(facts.encode()).hexdigest()

    def eval_identity(self) -> str | None:
        if not len(self.held_out) or self.config.skip_eval:
            return None
        facts = f"{self.pairs.identity('validation')} {len(self.held_out)}"
        return hashlib.sha256(facts.encode()).hexdigest()

    def describe(self) -> Mapping[str, Any]:
        manifest, lengths = self.pairs.manifest, np.asarray(self.train.lengths)
        heads, asked = self.settings.n_heads, self.config.n_heads
        notes = [f"{asked} heads do not divide hidden_size {self.config.hidden_size}: {heads} are used"]
        return {
            "notes": notes if asked not in (0, heads) else [],
            "dataset": self.config.dataset,
            "format": "(text, vector) pairs",
            "encoder": manifest["encoder"],
            "latent_dim": self.pairs.dim,
            "modes": sorted(self.modes.all()),
            "num_steps": self.num_steps(),
            "model_parameters": self.settings.num_parameters(),
            "train": {
                "examples": len(self.train),
                "tokens": int(lengths.sum()),
                "supervised_tokens": int(lengths.sum()),
                "longest": int(lengths.max()),
            },
            "eval": {"examples": len(self.held_out)},
        }

    def evaluate(self, session: Any, *, observer: Observer) -> Evaluation:
        """Return the loss on held-out pairs, always with the same noise, and the scores of decoding and encoding."""
        if not len(self.held_out):
            return Evaluation(metrics={})
        with averaged(session):
            # The rows are divided equally among all trained modes.
            shares = dict.fromkeys(self.modes.all(), 1.0)
            batch = self._batch(self.held_out, np.arange(len(self.held_out)), _EVALUATION, shares=shares)
            size = rows_per_evaluation(self.config, at_least=64)
            result = session.evaluate(divide_batch(batch, size=size))
            # A metric is NaN if no row has its mode.
            metrics = {"loss": result.loss} | {k: v for k, v in result.metrics.items() if v == v}
            sampler = session.task.sampler()
            samples: list[Sample] = []
            if self.modes.all() != {"t2l"}:
                samples = self._decode(sampler, metrics)
            if self.modes.all() != {"l2t"}:
                self._encode(sampler, metrics)
        return Evaluation(metrics=metrics, samples=samples)

    def _decode(self, sampler: Any, metrics: dict[str, float]) -> list[Sample]:
        pairs, vocabulary = self.held_out, self.pairs.vocabulary
        latents, tokens = np.asarray(pairs.latents, np.float32), np.asarray(pairs.tokens)
        lengths = np.asarray(pairs.lengths)
        shuffled = np.roll(latents, 1, axis=0)
        metrics["token_accuracy"] = one_shot_accuracy(sampler, latents, tokens, lengths)
        metrics["shuffled_accuracy"] = one_shot_accuracy(sampler, shuffled, tokens, lengths)
        options = DecodeOptions(steps=self.config.decode_steps, guidance=self.config.guidance)
        states: list[Any] = []

        def keep(step: int, steps: int, tokens: Any) -> None:
            if len(states) < steps:  # of the first batch only
                states.append(tokens[: self.config.num_samples])

        texts = vocabulary.decode_batch(sampler.decode(latents, options=options, on_step=keep).tokens)
        references = vocabulary.normalize(pairs.texts)
        metrics["exact_match"] = exact_match(texts, references)
        if has_sacrebleu():
            metrics |= text_scores(texts, references)
        return [
            Sample(
                prompt=f"the vector of held-out text {row + 1}",
                answer=texts[row],
                reference=references[row],
                frames=[vocabulary.show(state[row].tolist()) for state in states],
            )
            for row in range(min(self.config.num_samples, len(texts)))
        ]

    def _encode(self, sampler: Any, metrics: dict[str, float]) -> None:
        pairs = self.held_out
        latents = np.asarray(pairs.latents, np.float32)
        found = sampler.encode(np.asarray(pairs.tokens), np.asarray(pairs.lengths))
        metrics["t2l_cosine"] = cosine(found, latents)
        metrics["t2l_shuffled_cosine"] = cosine(found, np.roll(latents, 1, axis=0))
        metrics["t2l_retrieval"] = retrieval(found, latents)

    def complete_result(self, folder: Path) -> None:
        """Add the vocabulary and the encoder's identity to the model folder."""
        settings, _ = load_settings(folder)
        facts = {name: self.pairs.manifest[name] for name in ("encoder", "tokenizer_sha256")}
        settings.save(folder, **facts, modes=sorted(self.modes.all()))
        self.pairs.vocabulary.save(folder, tokenizer_folder=self.pairs.folder)
