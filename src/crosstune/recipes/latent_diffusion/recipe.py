"""Define the recipe latent_diffusion: batches of (text, vector) pairs with their noise, and evaluation by decoding."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from crosstune.config.schema import Config
from crosstune.core.errors import UserError
from crosstune.core.events import Observer
from crosstune.core.protocols import Evaluation, Sample, Session, Task
from crosstune.core.weight_average import averaged
from crosstune.data.row_order import RowOrder, rows_per_evaluation
from crosstune.recipes.latent_diffusion import scores
from crosstune.recipes.latent_diffusion.batch import LossWeights, PairBatch, divide_batch, make_batch
from crosstune.recipes.latent_diffusion.noise import draw
from crosstune.recipes.latent_diffusion.pair_folder import PairFolder, Pairs
from crosstune.recipes.latent_diffusion.sampling import DecodeOptions, Samples
from crosstune.recipes.latent_diffusion.settings import SETTINGS, load_settings, make_modes, make_settings

_EVALUATION = 2**40
"""Stands in the place of the step when an evaluation draws its noise."""


class LatentDiffusionRecipe:
    weight_name = "examples"

    def __init__(self, config: Config, pairs: PairFolder) -> None:
        self.config, self.pairs = config, pairs
        self.modes = make_modes(config)
        self.train = _limited(pairs.splits["train"], config.dataset_samples)
        self.held_out = _limited(pairs.splits.get("validation"), config.eval_samples)
        self.settings = make_settings(
            config, vocabulary=pairs.vocabulary.size, max_tokens=pairs.max_tokens, latent_dim=pairs.dim
        )
        self._task: Any = None

    def task(self, engine: str) -> Task:
        if engine != "torch":
            raise UserError(
                f"The recipe latent_diffusion has no task for the engine {engine}.",
                do="use a torch backend: --backend cuda, mps or cpu",
            )
        from crosstune.recipes.latent_diffusion.torch_parts import LatentDiffusionTask

        self._task = LatentDiffusionTask(
            self.settings, modes=self.modes.all(), latent_loss=self.config.latent_loss
        )
        task: Task = self._task
        return task

    def window(self, step: int) -> list[PairBatch]:
        rows = np.array(self.rows(step), np.int64)
        batch = self._batch(
            self.train,
            rows,
            key=(self.config.seed, step),
            shares=self.modes.at(step),
            dropped=self.config.cfg_dropout_prob,
            latent_noise=self.config.latent_noise,
        )
        return list(divide_batch(batch, size=self.config.batch_size))

    def _batch(
        self,
        pairs: Pairs,
        rows: Any,
        *,
        key: tuple[int, ...],
        shares: Mapping[str, float],
        dropped: float,
        latent_noise: float = 0.0,
    ) -> PairBatch:
        drawn = draw(
            np.asarray(pairs.lengths[rows], np.int32),
            max_tokens=self.pairs.max_tokens,
            dim=self.pairs.dim,
            shares=shares,
            dropped=dropped,
            key=key,
            latent_noise=latent_noise,
        )
        weights = LossWeights(text=self.config.text_loss_weight, latent=self.config.latent_loss_weight)
        return make_batch(pairs, rows, drawn, weights=weights)

    def rows(self, step: int) -> list[int]:
        return [example for row in self._order().rows(step) for example in row]

    def num_steps(self) -> int:
        return self._order().num_steps()

    def order(self) -> Mapping[str, Any]:
        return self._order().identity()

    def position(self, step: int) -> Mapping[str, Any]:
        return self._order().position(step)

    def _order(self) -> RowOrder:
        return RowOrder.from_config(self.config, num_examples=len(self.train))

    def longest_row(self) -> int:
        return int(self.train.lengths.max())

    def num_rows(self) -> int:
        return len(self.train)

    def longest_target(self) -> int:
        return self.longest_row()

    def longest_batch(self, size: int) -> PairBatch:
        longest = np.argsort(-np.asarray(self.train.lengths), kind="stable")
        return self._batch(
            self.train,
            np.sort(np.resize(longest, size)),
            key=(self.config.seed, 0),
            shares=self.modes.at(0),
            dropped=0.0,
        )

    def configure(self, config: Config) -> None:
        self.config = config

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

    def evaluate(self, session: Session, *, observer: Observer) -> Evaluation:
        """Return the loss on held-out pairs with noise that is the same each time, and how well some of them decode."""
        if not len(self.held_out):
            return Evaluation(metrics={})
        with averaged(session):
            result = session.evaluate(self._held_out_batches())
            metrics = {"loss": result.loss, **_finite(result.metrics)}
            sampler: Samples = self._task.sampler()
            samples: list[Sample] = []
            if self.modes.all() != {"t2l"}:
                samples = self._decode(sampler, metrics)
            if self.modes.all() != {"l2t"}:
                self._encode(sampler, metrics)
        return Evaluation(metrics=metrics, samples=samples)

    def _held_out_batches(self) -> Iterator[PairBatch]:
        """Yield the held-out rows, with the modes that are trained in equal shares."""
        batch = self._batch(
            self.held_out,
            np.arange(len(self.held_out)),
            key=(self.config.seed, _EVALUATION),
            shares=dict.fromkeys(self.modes.all(), 1.0),
            dropped=0.0,
        )
        yield from divide_batch(batch, size=rows_per_evaluation(self.config, at_least=64))

    def _decode(self, sampler: Samples, metrics: dict[str, float]) -> list[Sample]:
        pairs, vocabulary = self.held_out, self.pairs.vocabulary
        latents, tokens = np.asarray(pairs.latents, np.float32), np.asarray(pairs.tokens)
        lengths = np.asarray(pairs.lengths)
        metrics["token_accuracy"] = scores.one_shot_accuracy(sampler, latents, tokens, lengths)
        metrics["shuffled_accuracy"] = scores.one_shot_accuracy(
            sampler, np.roll(latents, 1, axis=0), tokens, lengths
        )
        options = DecodeOptions(steps=self.config.decode_steps, guidance=self.config.guidance)
        states: list[Any] = []

        def keep(step: int, steps: int, tokens: Any) -> None:
            if len(states) < steps:  # of the first rows; further ones come after those
                states.append(tokens[: self.config.num_samples])

        texts = vocabulary.decode_batch(sampler.decode(latents, options=options, on_step=keep).tokens)
        references = vocabulary.normalise(pairs.texts)
        metrics["exact_match"] = scores.exact_match(texts, references)
        if scores.has_sacrebleu():
            metrics |= scores.text_scores(texts, references)
        return [
            Sample(
                prompt=f"the vector of held-out text {row + 1}",
                answer=texts[row],
                reference=references[row],
                frames=[vocabulary.show(state[row].tolist()) for state in states],
            )
            for row in range(min(self.config.num_samples, len(texts)))
        ]

    def _encode(self, sampler: Samples, metrics: dict[str, float]) -> None:
        pairs = self.held_out
        latents = np.asarray(pairs.latents, np.float32)
        found = sampler.encode(np.asarray(pairs.tokens), np.asarray(pairs.lengths))
        metrics["t2l_cosine"] = scores.cosine(found, latents)
        metrics["t2l_shuffled_cosine"] = scores.cosine(found, np.roll(latents, 1, axis=0))
        metrics["t2l_retrieval"] = scores.retrieval(found, latents)

    def complete_result(self, folder: Path) -> None:
        """Add the vocabulary and the encoder's identity, which decoding needs."""
        settings, _ = load_settings(folder)
        facts = {name: self.pairs.manifest[name] for name in ("encoder", "tokenizer_sha256")}
        settings.save(folder, **facts, modes=sorted(self.modes.all()))
        self.pairs.vocabulary.save(folder, tokenizer_folder=self.pairs.folder)
        assert (folder / SETTINGS).is_file()


def _limited(pairs: Pairs | None, count: int) -> Pairs:
    if pairs is None:
        empty = np.zeros((0, 1))
        return Pairs(tokens=empty, lengths=np.zeros(0, np.int32), latents=empty, text_file=Path())
    return pairs if count < 0 or count >= len(pairs) else pairs.part(0, count)


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Leave out the metrics of modes that no row had."""
    return {name: value for name, value in metrics.items() if value == value}
